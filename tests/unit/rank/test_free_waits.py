"""Receives that leave the GPU free: nothing waits in a circle, and a peer that is gone is waited for as NCCL does."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.fill.attached import attached
from megatron.fill.errors import FillError
from megatron.fill.pages.ready import ReadyPage
from megatron.fill.pipeline import program as programs
from megatron.fill.pipeline.schedule import Pass, Schedule
from megatron.fill.pipeline.schedules import gpipe, interleaved, one_forward_one_backward
from megatron.fill.rank.freewaits import HELD_S, MOST_RELEASES, FreeWaits
from pipefill_patches import free_waits, p2p_communicator
from tests.support.streams import Gpus, HeldStreams

dist = pytest.importorskip("torch.distributed")
p2p = pytest.importorskip("megatron.core.pipeline_parallel.p2p_communication")


class Group:
    """A pipeline's process group."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


class Vanished(Exception):
    """A rank's process has been killed."""


class Caller:
    """A rank's program, which posts its transfers by Megatron's own functions; killed after so many ``calls``."""

    def __init__(self, gpus: Gpus, rank: int, ranks: int, *, batched: bool, calls: int = 1 << 30) -> None:
        self._calls = calls
        self._gpus, self._rank, self._ranks, self._batched = gpus, rank, ranks, batched
        self._requests: dict[tuple[str, Any], Any] = {}

    def compute(self, op: Any, transfers: Any = ()) -> None:
        self._live()
        self.wait(transfers)
        self._gpus.enqueue("compute")

    def exchange(self, sends: list[Any], receives: list[Any]) -> None:
        self._post(sends, receives, waits=True)
        if not self._batched:
            self.wait([*sends, *receives])

    def post(self, sends: list[Any], receives: list[Any]) -> None:
        self._post(sends, receives, waits=False)

    def wait(self, transfers: Any) -> None:
        for key in transfers:
            self._requests.pop(key).wait()

    def _live(self) -> None:
        self._calls -= 1
        if self._calls < 0:
            raise Vanished

    def _post(self, sends: list[Any], receives: list[Any], *, waits: bool) -> None:
        self._live()
        if not sends and not receives:
            return
        transfers: dict[str, Any] = {
            f"tensor_{way}_{side}": None for way in ("send", "recv") for side in ("prev", "next")
        }
        keys = {}
        for way, those in (("send", sends), ("recv", receives)):
            for key in those:
                onwards = (key[1].kind is Pass.FORWARD) == (way == "send")
                side = "next" if onwards else "prev"
                transfers[f"tensor_{way}_{side}"] = key
                keys[f"{way}_{side}"] = key
        neighbours = {"prev": (self._rank - 1) % self._ranks, "next": (self._rank + 1) % self._ranks}
        with called(waits):
            post = p2p._batched_p2p_ops if self._batched else p2p._p2p_ops
            found = post(
                **transfers,
                group=Group(self._rank, self._ranks),
                prev_pipeline_rank=neighbours["prev"],
                next_pipeline_rank=neighbours["next"],
            )
        if self._batched:
            for request in found:
                request.wait()
        else:
            self._requests |= {keys[name]: request for name, request in found.items()}


@contextlib.contextmanager
def called(waits: bool) -> Iterator[None]:
    before = p2p_communicator.transfers.waits
    p2p_communicator.transfers.waits = waits
    try:
        yield
    finally:
        p2p_communicator.transfers.waits = before


@contextlib.contextmanager
def posting_on(gpus: Gpus) -> Iterator[None]:
    """torch.distributed posts on these."""

    def stream(other: int, group: Any) -> Any:  # a communicator of each pair in each group has its own
        return ("nccl", min(gpus.rank, other), max(gpus.rank, other), isinstance(group, Group))

    patch = pytest.MonkeyPatch()
    patch.setattr(dist, "isend", lambda tensor, dst, group: gpus.transfer([("send", dst)], stream(dst, group)))
    patch.setattr(dist, "irecv", lambda tensor, src, group: gpus.transfer([("recv", src)], stream(src, group)))
    patch.setattr(dist, "get_backend", lambda group: "nccl")
    patch.setattr(dist, "P2POp", lambda op, tensor, peer, group: ("send" if op is dist.isend else "recv", peer))
    patch.setattr(dist, "batch_isend_irecv", lambda ops: [gpus.transfer(list(ops), "nccl batch")])
    try:
        yield
    finally:
        patch.undo()


def played(
    schedule: Schedule,
    *,
    batched: bool,
    one_queue: bool,
    free: bool,
    seed: int,
    patch: pytest.MonkeyPatch,
    refused: tuple[int, int] | None = None,
    killed: tuple[int, int] | None = None,
    gives_up: int | None = None,
) -> tuple[list[Any], int]:
    """What is left of a schedule's program when nothing moves any more; and how many receives were held up.

    Args:
        refused: the rank whose driver refuses to announce, and after how many times.
        killed: the rank that is killed, and after how many calls of its program; nobody is told.
        gives_up: the rank that ends by an error when nothing moves any more, as NCCL's timeout makes it.
    """
    ranks = schedule.stages
    gpus = Gpus(ranks, one_queue=one_queue)
    patch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1" if one_queue else "8")
    pages = [SimpleNamespace(rank=rank, words=gpus.words[rank], gone=gpus.gone[rank]) for rank in range(ranks)]
    everybody = []
    transfers = programs.Transfers(schedule)
    write = programs._writer(schedule)
    with posting_on(gpus):
        for rank in range(ranks):
            gpus.rank = rank
            if free:
                others: Any = {other: pages[other] for other in range(ranks) if other != rank}
                own: Any = pages[rank]
                writes = {} if refused is None or refused[0] != rank else {"writes": refused[1]}
                attached.waits = waits = FreeWaits(HeldStreams(gpus, rank, **writes), own, others, rank)
                everybody.append(waits)
            calls = 1 << 30 if killed is None or killed[0] != rank else killed[1]
            caller: Any = Caller(gpus, rank, ranks, batched=batched, calls=calls)
            caller.rank = rank
            try:
                write(schedule, transfers, caller)
            except Vanished:
                pass
            finally:
                attached.waits = None
    held = sum(op.kind == "wait" for queue in gpus.queues for op in queue)
    left = gpus.run(Random(seed))
    for _ in range(len(left) if refused else 0):  # what a guard sees at once, without any time
        for waits in everybody:
            waits.look(0.0)
        left = gpus.run(Random(seed))
    if killed is not None and everybody:
        living = [waits for rank, waits in enumerate(everybody) if rank != killed[0]]
        if gives_up is not None:
            everybody[gives_up].release()
        # A guard lets a receive go half a minute after it has seen that nothing comes; then its neighbours' may move.
        for round_ in range(2 * ranks + 2):
            for waits in living:
                waits.look(round_ * HELD_S)
            left = gpus.run(Random(seed))
    return left, held


@pytest.fixture
def patched() -> Iterator[None]:
    free_waits.PATCH.apply()
    try:
        yield
    finally:
        free_waits.PATCH.revert()


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Schedule, bool]:
    """A schedule, and whether its transfers are batched."""
    stages = draw(st.integers(2, 5))
    if draw(st.booleans()):
        return interleaved(stages, stages * draw(st.integers(1, 3)), draw(st.integers(2, 3))), False
    make = draw(st.sampled_from([one_forward_one_backward, gpipe]))
    return make(stages, draw(st.integers(1, 9))), draw(st.booleans())


@pytest.mark.usefixtures("patched")
@settings(max_examples=60)
@given(schedules(), st.booleans(), st.integers(0, 1000))
def test_no_schedule_waits_in_a_circle(made: tuple[Schedule, bool], one_queue: bool, seed: int) -> None:
    schedule, batched = made
    with pytest.MonkeyPatch.context() as patch:
        left, held = played(schedule, batched=batched, one_queue=one_queue, free=False, seed=seed, patch=patch)
        assert (left, held) == ([], 0)
        left, held = played(schedule, batched=batched, one_queue=one_queue, free=True, seed=seed, patch=patch)
        assert left == []
        assert held > 0


@pytest.mark.usefixtures("patched")
@settings(max_examples=50)
@given(schedules(), st.booleans(), st.integers(0, 1000), st.integers(0, 4), st.integers(0, 6))
def test_nobody_waits_for_a_rank_that_announces_no_longer(
    made: tuple[Schedule, bool], one_queue: bool, seed: int, rank: int, announced: int
) -> None:
    schedule, batched = made
    refused = (rank % schedule.stages, announced)
    with pytest.MonkeyPatch.context() as patch:
        left, _ = played(
            schedule, batched=batched, one_queue=one_queue, free=True, seed=seed, patch=patch, refused=refused
        )
    assert left == []


@pytest.mark.usefixtures("patched")
@settings(max_examples=50)
@given(schedules(), st.booleans(), st.integers(0, 1000), st.integers(0, 4), st.integers(0, 60), st.integers(1, 5))
def test_a_rank_that_vanishes_holds_up_no_more_than_it_does_with_nccl_alone(
    made: tuple[Schedule, bool], one_queue: bool, seed: int, rank: int, calls: int, other: int
) -> None:
    schedule, batched = made
    killed = (rank % schedule.stages, calls)
    gives_up = None if other >= schedule.stages else (killed[0] + other) % schedule.stages
    hung = []
    with pytest.MonkeyPatch.context() as patch:
        for free in (False, True):
            left, _ = played(
                schedule,
                batched=batched,
                one_queue=one_queue,
                free=free,
                seed=seed,
                patch=patch,
                killed=killed,
                gives_up=gives_up,
            )
            hung.append({element for op in left for element in op.elements})
    # Receives from the killed rank, and what comes after them, end by NCCL's timeout; nothing else is held up.
    assert hung[0] == hung[1]
    for op in left:  # with one queue, a wait that could end may be behind such a receive
        if op.kind == "wait" and op.word[0] != killed[0] and not one_queue:
            assert not all(before.over for before in op.after)


def test_the_neighbours_of_a_rank_that_gives_up_are_told_at_once(caplog: pytest.LogCaptureFixture) -> None:
    pages: list[Any] = [SimpleNamespace(words=[0, 0], gone=[0, 0]) for _ in range(2)]
    streams = Noted()
    first, second = (FreeWaits(streams, pages[rank], {1 - rank: pages[1 - rank]}, rank) for rank in (0, 1))
    for _ in range(3):
        with second.receive(0):
            pass
    first.announce(1)
    first.release()
    assert pages[1].gone == [1, 0]
    assert pages[1].words[0] >= 3  # no second passes
    pages[1].words[0] = 1  # what the first rank's stream still had to write comes now
    second.look(0.0)
    assert pages[1].words[0] == 3
    with caplog.at_level(logging.WARNING, "pipefill"):
        for _ in range(2):
            with second.receive(0):
                pass
    assert len([call for call in streams.calls if call[0] == "held"]) == 3
    assert caplog.text.count("rank 1: rank 0 announces nothing any more, so receives from it wait as NCCL does") == 1
    second.announce(0)
    assert streams.calls[-1] == ("write", 1, 1)


@pytest.mark.usefixtures("patched")
def test_the_streams_would_show_a_circle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: were sends announced after what is received has come, a steady state would stop."""
    announce = free_waits._announce
    late: list[Any] = []
    monkeypatch.setattr(free_waits, "_announce", lambda *asked: late.append(asked))
    real = HeldStreams.held

    @contextlib.contextmanager
    def held(self: Any, *arguments: Any) -> Iterator[None]:
        with real(self, *arguments):
            while late:
                announce(*late.pop())
            yield

    monkeypatch.setattr(HeldStreams, "held", held)
    schedule = one_forward_one_backward(3, 6)
    left, _ = played(schedule, batched=True, one_queue=False, free=True, seed=0, patch=monkeypatch)
    assert left


# --- one rank's


class Noted:
    """Streams that only write down what they are told."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def write(self, page: Any, index: int, value: int) -> None:
        self.calls.append(("write", index, value))

    @contextlib.contextmanager
    def held(self, sender: int, value: int) -> Iterator[None]:
        self.calls.append(("held", sender, value))
        yield


def make(rank: int = 0) -> tuple[FreeWaits, Noted, Any]:
    own: Any = SimpleNamespace(words=[0, 0, 0], gone=[0, 0, 0])
    streams = Noted()
    other: Any = SimpleNamespace(words=[0, 0, 0], gone=[0, 0, 0])
    return FreeWaits(streams, own, {1: other}, rank), streams, own


def test_transfers_are_counted_by_neighbour_and_those_of_another_node_left_alone() -> None:
    waits, streams, _ = make()
    for receiver in (1, 1, 2):
        waits.announce(receiver)
    for sender, hold in ((1, True), (2, True), (1, False), (1, True)):
        with waits.receive(sender, hold=hold):
            pass
    assert streams.calls == [("write", 0, 1), ("write", 0, 2), ("held", 1, 1), ("held", 1, 3)]


def test_a_sender_that_is_gone_is_waited_for_as_nccl_does(caplog: pytest.LogCaptureFixture) -> None:
    waits, streams, own = make()
    with waits.receive(1):
        pass
    waits.look(0.0)
    waits.look(HELD_S - 1)
    assert own.words[1] == 0
    with caplog.at_level(logging.WARNING, "pipefill"):
        waits.look(HELD_S)
    assert own.words[1] == 1
    assert "rank 0: nothing has come from rank 1 for 30 s" in caplog.text
    for number in range(2, MOST_RELEASES + 1):
        with waits.receive(1):
            pass
        waits.look(100.0 * number)
        waits.look(100.0 * number + HELD_S)
    assert "no receive of this rank is held up any more" in caplog.text
    with waits.receive(1):
        pass
    assert [call[0] for call in streams.calls] == ["held"] * MOST_RELEASES


def test_a_sender_that_is_slow_is_not_given_up_while_it_sends() -> None:
    waits, _, own = make()
    for _ in range(5):
        with waits.receive(1):
            pass
    for second in range(0, 100, 10):
        own.words[1] = min(4, second // 20)
        waits.look(float(second))
        if second < 80:
            assert own.words[1] == min(4, second // 20)


def test_at_the_end_nothing_is_held_up_any_more() -> None:
    waits, streams, own = make()
    for _ in range(2):
        with waits.receive(1):
            pass
    waits.release()
    assert own.words[1] == 2
    with waits.receive(1):
        pass
    assert len(streams.calls) == 2


def test_counts_go_around() -> None:
    waits, streams, own = make()
    waits._posted[1] = (1 << 32) - 1
    own.words[1] = (1 << 32) - 1
    with waits.receive(1):
        pass
    assert streams.calls == [("held", 1, 0)]
    waits.look(0.0)
    waits.look(HELD_S)
    assert own.words[1] == 0


@pytest.mark.usefixtures("patched")
def test_the_training_goes_on_where_the_driver_refuses(caplog: pytest.LogCaptureFixture) -> None:
    waits, streams, _ = make(rank=0)

    def refuse(*arguments: Any) -> None:
        raise FillError("the CUDA driver's cuStreamWriteValue32_v2 failed with code 1")

    streams.write = refuse  # type: ignore[method-assign,assignment]
    attached.waits = waits
    gpus = Gpus(2, one_queue=False)
    with posting_on(gpus), called(True), caplog.at_level(logging.WARNING, "pipefill"):
        found = p2p._p2p_ops(
            tensor_send_prev=None,
            tensor_recv_prev=None,
            tensor_send_next="tensor",
            tensor_recv_next="tensor",
            group=Group(0, 2),
            prev_pipeline_rank=1,
            next_pipeline_rank=1,
        )
    assert set(found) == {"send_next", "recv_next"}
    assert "leave the GPU free no longer: the CUDA driver's cuStreamWriteValue32_v2 failed" in caplog.text
    assert attached.waits is None


def test_a_page_is_seen_by_whoever_opens_it_and_has_no_name_afterwards() -> None:
    page = ReadyPage.create(3)
    again = ReadyPage(page.path, 3)
    page.forget()
    page.forget()
    again.words[2] = 7
    assert page.words[2] == 7
    assert page.size == 4096
    with pytest.raises(FileNotFoundError):
        ReadyPage(page.path, 3)

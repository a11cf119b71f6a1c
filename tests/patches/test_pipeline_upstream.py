"""Megatron's own schedule functions, run in virtual time, make the passes, times and bubbles that ``pipeline`` says.

A rank is a thread in Megatron's real function.  Passes take what the costs say of a clock of the rank's own; transfers
meet in mailboxes and end ``p2p_ns`` after both sides have posted them.  So no real time matters.  The kinds of the
bubbles come from the bus of the real patches.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.fill.hooks import BubbleBus
from megatron.fill.pipeline.costs import PipelineCosts, StageCost
from megatron.fill.pipeline.schedule import Op, Pass, Schedule
from megatron.fill.pipeline.schedules import interleaved, interleaved_warmup, make_schedule
from megatron.fill.pipeline.timeline import simulate
from megatron.fill.types import BubbleKind, CycleKey

TIMEOUT_S = 20

schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
pipeline_utils = pytest.importorskip("megatron.core.pipeline_parallel.utils")


class Mailbox:
    """Where sends and receives of one direction between two ranks meet, first with first."""

    def __init__(self) -> None:
        self._posted: tuple[list[int], list[int]] = ([], [])
        self._arrived = threading.Condition()

    def post(self, side: int, now_ns: int) -> int:
        with self._arrived:
            self._posted[side].append(now_ns)
            self._arrived.notify_all()
            return len(self._posted[side]) - 1

    def both_posted_ns(self, number: int) -> int:
        with self._arrived:
            met = self._arrived.wait_for(lambda: min(map(len, self._posted)) > number, TIMEOUT_S)
            assert met, "a transfer has one side only"
            return max(side[number] for side in self._posted)


class Listener:
    """Keeps the bubbles that have a length."""

    def __init__(self) -> None:
        self.waits: list[tuple[BubbleKind, int, int]] = []
        self._open: tuple[BubbleKind, int] = (BubbleKind.FILL, 0)

    def bubble_opened(self, kind: BubbleKind, index: int, now_ns: int, free_bytes: int | None = None) -> None:
        self._open = kind, now_ns

    def bubble_closed(self, now_ns: int) -> None:
        if now_ns > self._open[1]:
            self.waits.append((*self._open, now_ns))

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


class Rank:
    """What a thread knows of its rank."""

    def __init__(self, rank: int, schedule: Schedule, costs: PipelineCosts) -> None:
        self.rank, self.schedule, self.costs = rank, schedule, costs
        self.now_ns = costs.optimizer_ns[rank]
        self.spans: list[tuple[Op, int, int]] = []
        self.listener, self.bus = Listener(), BubbleBus()
        self.bus.listener, self.bus.clock = self.listener, lambda: self.now_ns
        self.bus.begin_iteration(1)
        self.bus.begin_schedule(CycleKey(schedule.name, schedule.microbatches, schedule.chunks))

    def compute(self, op: Op) -> None:
        stage = self.costs.stages[self.schedule.virtual_stage(self.rank, op)]
        start_ns = self.now_ns
        self.now_ns += stage.forward_ns if op.kind is Pass.FORWARD else stage.backward_ns
        self.spans.append((op, start_ns, self.now_ns))
        (self.bus.forward if op.kind is Pass.FORWARD else self.bus.backward)(start_ns)


class Request:
    """A transfer that is waited for by itself."""

    def __init__(self, rank: Rank, box: Mailbox, number: int, for_backward: bool) -> None:
        self._rank, self._box, self._number, self._for_backward = rank, box, number, for_backward

    def finish(self) -> None:
        self._rank.bus.open(for_backward=self._for_backward)
        ended_ns = self._box.both_posted_ns(self._number) + self._rank.costs.p2p_ns
        self._rank.now_ns = max(self._rank.now_ns, ended_ns)

    def wait(self) -> None:
        self.finish()
        self._rank.bus.close()


class Config:
    """A configuration of Megatron's in which everything that is not named is off."""

    def __init__(self, **values: Any) -> None:
        self.__dict__ |= values

    def __getattr__(self, name: str) -> None:
        return None


def communicator(rank: Rank, boxes: dict[tuple[int, str], Mailbox], config: Config) -> Any:
    """Megatron's own, but for the transfers."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    stages = rank.schedule.stages

    class Communicator(P2PCommunicator):
        def __init__(self) -> None:
            self.config = config
            self.pp_group = SimpleNamespace(size=lambda: stages, rank=lambda: rank.rank)
            self.virtual_pipeline_model_parallel_size = config.virtual_pipeline_model_parallel_size

        @property
        def total_stages(self) -> int:
            # As the patch has it: GPipe is 1F1B in a pipeline so deep that its warm-up holds every forward.
            return rank.rank + 1 + rank.schedule.microbatches if rank.schedule.name == "gpipe" else stages

        @property
        def current_stage(self) -> int:
            return rank.rank

        def _communicate(
            self, *, tensor_send_next, tensor_send_prev, recv_prev, recv_next, tensor_shape, wait_on_reqs=True
        ):
            after, before = (rank.rank + 1) % stages, (rank.rank - 1) % stages
            posts = [
                ("send_next", (after, "down"), 0, tensor_send_next is not None),
                ("recv_prev", (rank.rank, "down"), 1, recv_prev),
                ("send_prev", (before, "up"), 0, tensor_send_prev is not None),
                ("recv_next", (rank.rank, "up"), 1, recv_next),
            ]
            requests = {
                name: Request(
                    rank,
                    boxes[where],
                    boxes[where].post(side, rank.now_ns),
                    recv_next if wait_on_reqs else name == "recv_next",
                )
                for name, where, side, wanted in posts
                if wanted
            }
            if wait_on_reqs:
                for request in requests.values():
                    request.finish()
                rank.bus.close()
            return object() if recv_prev else None, object() if recv_next else None, requests

    return Communicator()


def run_megatron(schedule: Schedule, costs: PipelineCosts, group_size: int) -> list[Rank]:
    """The ranks after Megatron's schedule function has run in each."""
    from megatron.core.enums import ModelType
    from megatron.core.process_groups_config import ProcessGroupCollection

    many = schedule.name == "interleaved"
    boxes = {(rank, way): Mailbox() for rank in range(schedule.stages) for way in ("down", "up")}
    groups = ProcessGroupCollection()
    groups.tp = groups.cp = groups.pp = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    here = threading.local()

    def forward_step(*_: Any, current_microbatch: int, vp_stage: int = 0, **__: Any) -> tuple[Op, int]:
        op = Op(Pass.FORWARD, current_microbatch, vp_stage)
        here.rank.compute(op)
        return op, 0

    def backward_step(_: Any, output: Op, *__: Any) -> object:
        here.rank.compute(Op(Pass.BACKWARD, output.microbatch, output.chunk))
        return object()

    def run(rank: Rank) -> Rank:
        import torch

        here.rank = rank
        config = Config(
            overlap_p2p_comm=many,
            deallocate_pipeline_outputs=True,
            microbatch_group_size_per_vp_stage=group_size,
            virtual_pipeline_model_parallel_size=schedule.chunks if many else None,
            hidden_size=1,
            variable_seq_lengths=False,
        )
        model = []
        for _ in range(schedule.chunks):
            model.append(torch.nn.Module())
            model[-1].config, model[-1].model_type = config, ModelType.encoder_or_decoder
        function = (
            schedules.forward_backward_pipelining_with_interleaving
            if many
            else schedules.forward_backward_pipelining_without_interleaving
        )
        function(
            forward_step_func=None,
            data_iterator=[None] * schedule.chunks,
            model=model,
            num_microbatches=schedule.microbatches,
            seq_length=1,
            micro_batch_size=1,
            p2p_communicator=communicator(rank, boxes, config),
            pg_collection=groups,
        )
        return rank

    class HostTorch:
        """torch, with the count of tokens on the host."""

        def __getattr__(self, name: str) -> Any:
            import torch

            return getattr(torch, name)

        def zeros(self, *_: Any, **__: Any) -> int:
            return 0

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(schedule.stages) as pool:
        patch.setattr(schedules, "torch", HostTorch())
        patch.setattr(pipeline_utils, "get_pg_rank", lambda group: group.rank())
        patch.setattr(pipeline_utils, "get_pg_size", lambda group: group.size())
        patch.setattr(schedules, "forward_step", forward_step)
        patch.setattr(schedules, "backward_step", backward_step)
        patch.setattr(schedules, "deallocate_output_tensor", lambda *_: None)
        return list(pool.map(run, [Rank(rank, schedule, costs) for rank in range(schedule.stages)], timeout=TIMEOUT_S))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, PipelineCosts, int]:
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "interleaved"]))
    stages = draw(st.integers(2, 4))
    if name == "interleaved":
        group = draw(st.integers(stages, stages + 2))
        last = draw(st.sampled_from([0, *range(stages, group)]))
        schedule = interleaved(stages, draw(st.integers(1, 2)) * group + last, draw(st.integers(2, 3)), group)
    else:
        group = stages
        schedule = make_schedule(name, stages, draw(st.integers(1, 7)))
    times = st.integers(1, 50)
    costs = PipelineCosts(
        tuple(StageCost(draw(times), draw(times)) for _ in range(schedule.virtual_stages)),
        draw(st.integers(0, 20)),
        (0,) * stages,
        tuple(draw(st.lists(times, min_size=stages, max_size=stages))),
    )
    return schedule, costs, group


@settings(max_examples=150)
@given(cases())
def test_passes_times_and_bubbles_are_megatrons(case: tuple[Schedule, PipelineCosts, int]):
    schedule, costs, group = case
    timeline = simulate(schedule, costs, rendezvous=True)
    ranks = run_megatron(schedule, costs, group)
    assert timeline.period_ns == max(rank.now_ns for rank in ranks)
    for rank, spans, waits in zip(ranks, timeline.spans, timeline.waits, strict=True):
        assert rank.spans == list(spans)
        collective = [(BubbleKind.DRAIN, rank.now_ns, timeline.period_ns)]
        assert rank.listener.waits + collective * (rank.now_ns < timeline.period_ns) == list(waits)


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("chunks", [2, 3])
def test_the_interleaved_order_is_that_of_megatrons_tables(stages: int, chunks: int):
    for microbatches in range(stages, 11):
        for group in range(stages, microbatches + 1):
            if 0 < microbatches % group < stages:
                continue
            schedule = interleaved(stages, microbatches, chunks, group)
            table = schedules.get_schedule_table(microbatches, chunks, group)
            for rank, row in enumerate(schedule.order):
                who = SimpleNamespace(size=lambda: stages, rank=lambda rank=rank: rank)
                fake = SimpleNamespace(pp_group=who, virtual_pipeline_model_parallel_size=chunks)
                counts = schedules.get_pp_rank_microbatches(microbatches, chunks, group, p2p_communicator=fake)
                assert interleaved_warmup(stages, microbatches, chunks, group, rank) == counts[2]
                assert [(op.microbatch, op.chunk) for op in row if op.kind is Pass.FORWARD] == table
                backwards = [(op.microbatch, op.chunk) for op in row if op.kind is Pass.BACKWARD]
                assert backwards == [(microbatch, chunks - 1 - chunk) for microbatch, chunk in table]
                leading = counts[2] + (counts[3] > 0)
                assert [op.kind for op in row].index(Pass.BACKWARD) == leading


def test_transfers_meet_first_with_first():
    box = Mailbox()
    assert (box.post(0, 5), box.post(1, 3), box.post(1, 9), box.post(0, 6)) == (0, 0, 1, 1)
    assert (box.both_posted_ns(0), box.both_posted_ns(1)) == (5, 9)

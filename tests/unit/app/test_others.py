"""Ranks meet at the end of a training without collectives, and one that is late makes no other fail."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron.fill.app import closing
from megatron.fill.app.closing import Others
from megatron.fill.errors import FillError
from megatron.fill.records.unwritten import Unwritten
from megatron.fill.types import RankInfo


def others(rank: int, ranks: int, most_s: float = 60.0, segment: str = "0") -> Others:
    return Others(segment, RankInfo(rank, ranks, rank, ranks, 0, 1, stage=rank, stages=ranks, device="cpu"), most_s)


class Gone(dist.Store):
    """The store of a rank 0 that has ended."""

    def check(self, keys: list[str]) -> bool:
        raise dist.DistNetworkError("Broken pipe")

    def set(self, key: str, value: bytes) -> None:
        raise dist.DistNetworkError("Broken pipe")

    def add(self, key: str, by: int) -> int:
        raise dist.DistNetworkError("Broken pipe")


@pytest.fixture(autouse=True)
def _store(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: store)


def test_rank_0_gets_what_the_others_hand_in():
    left = {1: Unwritten("a"), 2: Unwritten(lost=True)}
    for rank in range(3):
        others(rank, 3).hand_in(left.get(rank, Unwritten()))
    assert others(0, 3).collect() == left
    assert closing._ALL_BYTES // 4096 >= 64


def test_rank_0_waits_for_a_rank_that_works_on():
    first = others(0, 2)
    first.hand_in(Unwritten())
    late = threading.Timer(0.2, others(1, 2).hand_in, [Unwritten("a")])
    late.start()
    assert first.collect() == {1: Unwritten("a")}
    late.join()


def test_a_rank_that_does_not_come_is_named_and_not_waited_for_without_end(caplog, capsys, monkeypatch):
    monkeypatch.setattr(closing, "_SOON_S", 0.0)
    for rank in (0, 2):
        others(rank, 4).hand_in(Unwritten("a"))
    assert others(0, 4, most_s=0.1).collect() == {0: Unwritten("a"), 2: Unwritten("a")}
    assert caplog.messages == ["ranks 1, 3 had not ended after 0.1 s: the report may lack what was recorded last"]
    assert capsys.readouterr().out == "PipeFill: waiting for other ranks to end, for at most 0.1 s\n"


def test_what_an_earlier_start_handed_in_does_not_count():
    others(1, 2, segment="0").hand_in(Unwritten("old"))
    others(0, 2, segment="1").hand_in(Unwritten())
    assert others(0, 2, most_s=0.0, segment="1").collect() == {}


def test_ranks_meet_as_often_as_they_like():
    met = []

    def meet(rank: int) -> None:
        these = others(rank, 3)
        for number in range(3):
            these.meet(number)
        met.append(rank)

    threads = [threading.Thread(target=meet, args=[rank]) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(met) == [0, 1, 2]


def test_ranks_that_do_not_meet_go_on():
    with pytest.raises(FillError, match=r"not all ranks have ended their training within 0\.1 s"):
        others(0, 2, most_s=0.1).meet(0)
    with pytest.raises(FillError):  # at once, though it may wait longer
        others(1, 2).meet(0)


def test_a_rank_that_comes_after_the_end_of_rank_0_does_not_fail(monkeypatch):
    gone = Gone()
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: gone)
    late = others(1, 2)
    late.hand_in(Unwritten())
    with pytest.raises(FillError, match="the other ranks cannot be reached: Broken pipe"):
        late.meet(0)
    with pytest.raises(RuntimeError):  # logged by the caller, as records are lost
        late.hand_in(Unwritten("a"))


@pytest.mark.parametrize(("ranks", "named"), [(2, "rank 1"), (20, "ranks 1, 2, 3, 4, 5, 6 and 13 more")])
def test_a_message_names_few_ranks(caplog, ranks, named):
    others(0, ranks).hand_in(Unwritten())
    others(0, ranks, most_s=0.0).collect()
    (message,) = caplog.messages
    assert message.startswith(f"{named} had not ended after 0 s: ")

"""The ranks of a node measure their jobs in turn on the CPU, and nobody waits for a rank whose session failed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.fill.app import closing
from megatron.fill.config import FillSettings
from megatron.fill.types import RankInfo


def info(device: str, local_rank: int = 0) -> RankInfo:
    return RankInfo(local_rank, 3, local_rank, 3, 0, 1, stage=local_rank, stages=3, device=device)


def test_on_the_cpu_there_is_a_turn_for_each_rank_of_a_node_and_on_gpus_one_for_all():
    asked = FillSettings(store="s.db", baseline_seconds=1.0)
    assert closing.rounds(asked, info("cpu")) == 3
    assert closing.rounds(asked, info("cuda:0")) == 1
    assert closing.rounds(FillSettings(store="s.db"), info("cpu")) == 0


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    done: list[str] = []
    monkeypatch.setattr(closing.time, "sleep", lambda seconds: done.append(f"rest {seconds:g}"))
    return done


def others(done: list[str]) -> Any:
    return SimpleNamespace(meet=lambda number: done.append(f"meet {number}"))


def session(done: list[str], local_rank: int) -> Any:
    measure = SimpleNamespace(info=info("cpu", local_rank))
    measure.measure_alone = lambda seconds: done.append(f"measure {seconds:g}")
    return measure


@pytest.mark.parametrize("local_rank", [0, 1, 2])
def test_a_rank_measures_in_its_turn_and_rests_in_the_others(done, local_rank):
    closing.measure_alone(session(done, local_rank), 3, 2.0, others(done))
    expected = ["rest 2"] * 3
    expected[local_rank] = "measure 2"
    assert done == ["meet 0", expected[0], "meet 1", expected[1], "meet 2", expected[2], "meet 3"]


def test_a_rank_without_a_session_keeps_step_with_the_others(done):
    closing.measure_alone(None, 3, 2.0, others(done))
    assert done == ["meet 0", "rest 2", "meet 1", "rest 2", "meet 2", "rest 2", "meet 3"]


def test_a_node_with_more_ranks_than_turns_has_two_in_one(done):
    closing.measure_alone(session(done, 2), 2, 1.0, others(done))
    assert done == ["meet 0", "measure 1", "meet 1", "rest 1", "meet 2"]


def test_nothing_is_waited_for_if_nothing_is_measured(done):
    closing.measure_alone(session(done, 0), 0, 0.0, others(done))
    assert done == []

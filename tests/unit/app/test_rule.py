"""What is left of bubbles where the user says nothing else: it depends on how the GPU is shared."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron.fill.app.listening import rank_spec
from megatron.fill.config import FillSettings
from megatron.fill.device.port import Sharing
from megatron.fill.rank.predictor import CASES, among_replicas
from megatron.fill.rank.rule import FillRule
from megatron.fill.types import RankInfo

MS = 1_000_000


def rule_of(settings: FillSettings, sharing: Sharing | None, ranks: int = 4) -> FillRule:
    return rank_spec(settings, RankInfo(0, ranks, 0, 1, 0, 1, 0, 4), Path("rank0.json"), sharing).rule


@pytest.mark.parametrize("sharing", [None, Sharing.MPS])
def test_where_nobody_takes_turns_no_end_is_kept_free(sharing):
    rule = rule_of(FillSettings(), sharing)
    assert (rule.guard_ns, rule.min_bubble_ns, rule.stages) == (0, MS, 4)


def test_a_time_sliced_gpu_keeps_a_turn_free_and_leaves_short_bubbles_alone():
    rule = rule_of(FillSettings(), Sharing.TIMESLICE)
    assert (rule.guard_ns, rule.min_bubble_ns) == (2 * MS, 5 * MS)


@pytest.mark.parametrize("sharing", [None, *Sharing])
def test_what_the_user_says_counts(sharing):
    rule = rule_of(FillSettings(guard_us=0, min_bubble_us=300), sharing)
    assert (rule.guard_ns, rule.min_bubble_ns) == (0, 300_000)


@pytest.mark.parametrize(("ranks", "replicas"), [(8, 2), (4, 1), (1, 1), (256, 64)])
def test_ranks_that_share_a_stage_are_its_replicas(ranks, replicas):
    assert rule_of(FillSettings(), None, ranks).replicas == replicas


def longest_of(times: np.ndarray, replicas: int) -> float:
    """The mean of the longest of so many, row by row."""
    return float(times[:, :replicas].max(axis=1).mean())


@pytest.mark.parametrize("replicas", [2, 8, 64, 512])
@pytest.mark.parametrize("noise_ms", [1.0, 5.0, 25.0])
def test_what_runs_on_in_every_replica_costs_the_longest_of_them_no_more_than_it_may(replicas, noise_ms):
    random = np.random.default_rng(replicas)
    shape = (1500, replicas)
    times = random.normal(500.0, noise_ms, shape)
    longest = times.max(axis=1)
    scale = (np.median(longest) - np.quantile(longest, 0.1)) / np.log(np.log(10) / np.log(2))
    may = 2.5
    step = among_replicas(2 * CASES * may, replicas, scale)  # the longest that may be caught in one case
    late = np.where(random.random(shape) < 1 / CASES, random.uniform(0, step, shape), 0.0)
    assert longest_of(times + late, replicas) - longest_of(times, replicas) <= 1.05 * may
    alone = np.where(random.random(shape) < 2 * may / (2 * CASES * may), random.uniform(0, 2 * CASES * may, shape), 0.0)
    if replicas > 2 and noise_ms < 10:  # what one replica may do costs more than that among many
        assert longest_of(times + alone, replicas) - longest_of(times, replicas) > 1.05 * may


def test_a_training_whose_iterations_do_not_vary_divides_what_overruns_may_cost_among_its_replicas():
    assert [among_replicas(1000.0, replicas, 0.0) for replicas in (1, 2, 512)] == [1000.0, 500.0, 1000 / 512]


def test_the_more_the_replicas_vary_the_more_may_run_on_up_to_a_half():
    may = [among_replicas(1000.0, 64, scale) for scale in (0.0, 10.0, 1e3, 1e5, 1e9)]
    assert may == sorted(may)
    assert may[-1] == pytest.approx(500, rel=0.01)

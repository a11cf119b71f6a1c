"""scripts/benchmarks/sim_replicas.py: what a late step of one replica costs a training that waits for all replicas."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megatron.fill.rank.rule import FillRule
from megatron.fill.types import Bubble, BubbleKind, Iteration, RankInfo, RankRecord
from scripts.benchmarks import sim_replicas
from scripts.benchmarks.sim_replicas import filled, mean_of_largest, stages_of, study

MS = 1_000_000


def record() -> RankRecord:
    """Iterations of 50 ms with one bubble of about 20 ms, whose end is hard to predict."""
    rng = random.Random(0)
    iterations, bubbles = [], []
    for number in range(1, 61):
        start = (number - 1) * 50 * MS
        opened = start + 10 * MS
        bubbles.append(Bubble(number, 0, BubbleKind.INTERIOR, opened, opened + rng.randint(19 * MS, 21 * MS)))
        iterations.append(Iteration(number, start, start + 50 * MS, False, 0))
    return RankRecord(RankInfo(0, 1, 0, 1, 0, 1, 0, 1), iterations, bubbles, [])


def test_the_longest_of_more_replicas_is_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim_replicas, "last_segment", lambda run: SimpleNamespace(records=lambda: iter([record()])))
    rows = study(Path(), [2.0], [1, 4, 16], overrun=0.5, turns=3, noise=1.0)
    slowdowns = [row["slowdown_undivided"] for row in rows]
    assert 0 < slowdowns[0] < slowdowns[1] < slowdowns[2]
    assert all(row["slowdown"] <= row["slowdown_undivided"] for row in rows)
    assert all(0 < row["harvest_ratio"] <= row["harvest_ratio_undivided"] < 1 for row in rows)


def test_nothing_is_late_where_nothing_is_filled() -> None:
    (stage,), took_ns = stages_of([record()], noise=1.0)
    orders = [list(range(len(took_ns)))]
    longest_ns = took_ns[np.array(orders)]
    (late_ns,), harvested = filled(stage, longest_ns, 2.0, FillRule(min_bubble_ns=1000 * MS), orders, seed=0)
    assert (late_ns.sum(), harvested) == (0, 0.0)


def test_the_expected_maximum_of_draws() -> None:
    values = np.array([0.0, 1.0])
    assert [mean_of_largest(values, count) for count in (1, 2, 3)] == [0.5, 0.75, 0.875]

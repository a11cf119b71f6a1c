"""The pipeline simulator against bubble rates that others published of real models."""

from __future__ import annotations

import pytest

from scripts.benchmarks import bench_sim


def test_bubble_rates_of_the_zero_bubble_paper(monkeypatch):
    monkeypatch.setattr(bench_sim, "PUBLISHED", bench_sim.PUBLISHED[:6])  # the others take seconds
    for row in bench_sim.zero_bubble():
        for name in ("1f1b", "zb-h1"):
            assert row[name] == pytest.approx(row[f"{name}_published"], abs=0.001), row

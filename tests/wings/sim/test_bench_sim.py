"""scripts/benchmarks/bench_sim.py: which of the measured figures become the headline."""

import argparse
import json
from pathlib import Path

import pytest

from scripts.benchmarks import bench_sim

RECORDED = Path(__file__).parents[3] / "docs" / "benchmarks" / "sim.json"


def options(*runs):
    return argparse.Namespace(harvest_from=[{"preempting": on, "harvest": harvest} for on, harvest in runs])


def test_the_harvest_is_the_least_of_those_on_a_device_that_does_not_preempt():
    found = bench_sim._harvest(options((True, 0.7), (False, 0.9), (False, 0.8), (True, 0.95)))
    assert found["harvest"] == 0.8


def test_a_harvest_above_one_is_the_hosts_doing_and_counts_as_one():
    assert bench_sim._harvest(options((False, 1.05)))["harvest"] == 1.0


def test_trainings_on_the_cpu_as_it_is_alone_are_refused():
    with pytest.raises(SystemExit, match="expected at least one without"):
        bench_sim._harvest(options((True, 0.95)))


def test_the_recorded_summary_is_what_the_recorded_parts_make():
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    assert recorded["summary"] == bench_sim._summary(recorded)
    large = next(row for row in recorded["paper"]["rows"] if row["gpus"] == 8192)
    assert recorded["summary"]["gpus_worth_8k"] == large["gpus_worth_filled"]
    used = json.loads((RECORDED.parent / "harvest.json").read_text(encoding="utf-8"))
    assert recorded["paper"]["harvest"] == pytest.approx(used["harvest"], abs=0.0005)

"""Devices that are alike may be treated as one: the simulation finds the same as if each is looked at by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.fill.scheduler import policies
from megatron.fill.wings.sim.cluster.simulate import simulate
from megatron.fill.wings.sim.values import Scenario, SimOutcome
from tests.support.clusters import any_policy, scenarios, simulate_each


def both(scenario: Scenario) -> tuple[SimOutcome, SimOutcome]:
    return replace(simulate(scenario), wall_s=0.0), replace(simulate_each(scenario), wall_s=0.0)


@given(scenarios(any_policy))
@settings(max_examples=80)
def test_symmetry_changes_nothing(scenario):
    symmetric, naive = both(scenario)
    assert symmetric == naive


@given(scenarios(st.just("makespan"), most_devices=4))
@settings(max_examples=60)
def test_makespan_needs_to_see_only_the_next_device_of_each_kind(scenario):
    symmetric, naive = both(scenario)
    assert symmetric == naive


@given(scenarios(any_policy))
@settings(max_examples=40)
def test_symmetry_changes_nothing_when_more_jobs_wait_than_are_weighed(scenario):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policies, "MOST_JOBS", 3)
        symmetric, naive = both(scenario)
    assert symmetric == naive


@given(scenarios(any_policy))
@settings(max_examples=20)
def test_the_same_scenario_has_the_same_outcome(scenario):
    assert replace(simulate(scenario), wall_s=0.0) == replace(simulate(scenario), wall_s=0.0)

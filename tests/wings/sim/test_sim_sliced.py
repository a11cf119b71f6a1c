"""The simulation of a shared GPU: who gets how much of it, where that can be said without a simulation."""

from __future__ import annotations

import pytest

from megatron.fill.rank.rule import FillRule
from scripts.benchmarks.studies.sliced import RankWaits, SharedGpu, SlicedSharing, SlicedWorker, play


def run_step(sharing: SlicedSharing, step: float, runnable: bool = True, computes: bool = False) -> SharedGpu:
    """A step of so many ms, launched at the beginning of one of the rank's slices of 2 ms."""
    gpu = SharedGpu(sharing, 2.0)
    gpu.launch(step)
    while gpu.left:
        gpu.go_on(1e6, runnable, computes)
    return gpu


@pytest.mark.parametrize(
    ("step", "takes"),
    [(1.0, 3.0), (2.0, 4.0), (3.0, 7.0), (4.0, 8.0)],  # the rank's slice comes first each time
)
def test_a_step_beside_a_spinning_receive_gets_every_other_slice(step, takes):
    gpu = run_step(SlicedSharing.SLICES, step)
    assert gpu.took == [pytest.approx(takes)]
    assert (gpu.worked, gpu.busy) == (pytest.approx(step), pytest.approx(takes))


def test_a_step_beside_a_host_that_waits_has_the_gpu():
    assert run_step(SlicedSharing.HOST_SLICES, 3.0, runnable=False).took == [pytest.approx(3.0)]


@pytest.mark.parametrize(("computes", "takes"), [(False, 3.0), (True, 6.0)])
def test_side_by_side_a_receive_takes_nothing_and_compute_half(computes, takes):
    assert run_step(SlicedSharing.SIDE_BY_SIDE, 3.0, computes=computes).took == [pytest.approx(takes)]


def test_a_transfer_waits_for_the_ranks_slice():
    gpu = SharedGpu(SlicedSharing.SLICES, 2.0)
    gpu.launch(10.0)
    gpu.go_on(float("inf"), until=3.0)  # the worker has had 1 ms of its first slice
    assert gpu.go_on(0.5) == 0.0
    assert gpu.now == pytest.approx(4.5)


def test_what_ends_before_the_data_arrive_delays_nobody():
    quiet, rule = RankWaits(noise=0.0, transfer=0.5), FillRule(guard_ns=500_000)
    for sharing in SlicedSharing:
        filled, empty = (play(quiet, one, sharing, rule, iterations=30) for one in (SlicedWorker(), None))
        assert filled.late
        assert max(filled.late) == pytest.approx(0.0, abs=1e-6)
        assert filled.took == pytest.approx(empty.took)
        assert 0 < filled.worked < filled.bubbles
        assert empty.worked == 0.0


def test_a_step_in_flight_while_the_data_arrive_delays_the_end_of_the_bubble():
    waits = RankWaits(lengths=(5.0,), noise=0.0, transfer=1.5)  # two steps of 3 ms and their gap fit into 6.5 ms
    played = play(waits, SlicedWorker(wake=0.0), SlicedSharing.HOST_SLICES, FillRule(), iterations=30)
    assert min(played.late) > 0.1


def test_a_hosts_clock_sees_about_twice_of_what_slices_give():
    played = play(RankWaits(noise=0.0), SlicedWorker(step=2.0), SlicedSharing.SLICES, FillRule(), iterations=30)
    assert 1.8 * played.worked < played.busy <= 2 * played.worked + 1e-6


def test_a_guard_takes_of_the_harvest_and_ends_steps_earlier():
    rough = RankWaits(noise=3.0)
    found = [
        play(rough, SlicedWorker(), SlicedSharing.SLICES, FillRule(guard_ns=guard), iterations=100)
        for guard in (0, 3_000_000)
    ]
    assert found[1].worked < found[0].worked
    assert sum(found[1].late) < sum(found[0].late)

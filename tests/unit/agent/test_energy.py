"""Energy by time: the parts of jobs and training make up what the device used."""

from __future__ import annotations

import pytest

from megatron.fill.agent.energy import EnergyShare
from tests.support.fake_device import FakeDevice, FakeMachine

S = 10**9


class Watched:
    """A job's share on a device, and a clock that both jobs have."""

    def __init__(self, device: FakeDevice, clock: list[int]) -> None:
        self.had_ns = 0
        self.share = EnergyShare(device.energy_j, lambda: self.had_ns, lambda: clock[0])


def test_the_parts_make_up_the_whole():
    machine, clock = FakeMachine(energy_j=5e6), [0]
    first, second = (Watched(FakeDevice(machine), clock) for _ in range(2))
    total_j, training_j = 5e6, 0.0
    for joules, first_s, second_s in ((300.0, 0.3, 0.1), (500.0, 0.0, 0.5), (100.0, 0.25, 0.0)):
        clock[0] += S
        total_j += joules
        machine.energy_j = total_j
        first.had_ns += int(first_s * S)
        second.had_ns += int(second_s * S)
        first.share.look()
        second.share.look()
        training_j += joules * (1 - first_s - second_s)
    assert (first.share.joules, second.share.joules) == pytest.approx((115.0, 280.0))
    jobs_j = sum(job.share.joules or 0.0 for job in (first, second))
    assert jobs_j + training_j == pytest.approx(total_j - 5e6)


def test_a_bubble_that_began_before_the_span_counts_for_no_more_than_it_has():
    machine, clock = FakeMachine(energy_j=0.0), [0]
    job = Watched(FakeDevice(machine), clock)
    for had_s, total_j in ((0.0, 10.0), (1.5, 30.0), (1.5, 40.0)):
        clock[0] += S
        machine.energy_j, job.had_ns = total_j, int(had_s * S)
        job.share.look()
        job.share.look()  # at the same time
    assert job.share.joules == pytest.approx(20 + 10 / 2)


def test_a_counter_that_is_away_or_starts_again_takes_nothing_off():
    machine, clock = FakeMachine(energy_j=7.0), [0]
    job = Watched(FakeDevice(machine), clock)
    for total_j in (None, 17.0, 3.0, 4.0):
        clock[0] += S
        machine.energy_j, job.had_ns = total_j, clock[0]
        job.share.look()
    assert job.share.joules == pytest.approx(11.0)
    assert Watched(FakeDevice(FakeMachine()), clock).share.joules is None

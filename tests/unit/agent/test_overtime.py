"""The account of CPU time outside bubbles."""

from __future__ import annotations

import time

import pytest

from megatron.fill.agent.enforcer import Overtime
from megatron.fill.pages.gate import SharedGate, SharedGateReader


class Bench:
    """A worker and a clock that the test moves."""

    def __init__(self, cores: int = 1) -> None:
        self.gate = SharedGate()
        self.now_s = self.busy_s = 0.0
        self.open_ns = 0
        reader = SharedGateReader(self.gate.reader_fd())
        reader.open_ns = lambda: self.open_ns  # type: ignore[method-assign]
        self.overtime = Overtime(lambda: self.busy_s, reader, cores, lambda: self.now_s)
        self.overtime.look()

    def passes(self, seconds: float, busy: float, is_open: float = 0.0) -> None:
        self.now_s += seconds
        self.busy_s += busy
        self.open_ns += int(is_open * 1e9)
        self.overtime.look()


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_start_may_take_its_time_and_a_little_work_goes_on_for_ever(bench):
    bench.passes(20, busy=20)
    for _ in range(1000):
        bench.passes(1, busy=0.04)
    assert not bench.overtime.overdrawn


def test_work_inside_bubbles_is_no_overtime(bench):
    for _ in range(1000):
        bench.passes(1, busy=0.5, is_open=0.5)
    assert not bench.overtime.overdrawn


def test_work_between_bubbles_is_stopped_there(bench):
    for _ in range(40):
        bench.passes(1, busy=1.3, is_open=0.3)
    assert bench.overtime.overdrawn
    assert bench.overtime.exceeded_s  # it went on, though it was to be stopped


def test_one_that_is_stopped_pays_its_debt(bench):
    bench.passes(30, busy=32)
    assert bench.overtime.overdrawn
    assert bench.overtime.exceeded_s == 0
    bench.passes(60, busy=30, is_open=30)
    assert not bench.overtime.overdrawn


def test_cores_of_its_own_count_in_bubbles_only():
    wide = Bench(cores=4)
    for _ in range(100):
        wide.passes(1, busy=2.0, is_open=0.5)
    assert not wide.overtime.overdrawn
    wide.passes(10, busy=40)
    assert wide.overtime.overdrawn


def test_the_gate_tells_how_long_bubbles_were_open():
    gate = SharedGate()
    reader = SharedGateReader(gate.reader_fd())
    assert (reader.shut, reader.open_ns()) == (True, 0)
    gate.open(0, 0)
    opened_ns = reader.current().opened_ns  # type: ignore[union-attr]
    assert not reader.shut
    assert reader.open_ns() <= time.monotonic_ns() - opened_ns
    gate.close(opened_ns + 5_000_000)
    gate.open(0, 0)
    opened_ns = reader.current().opened_ns  # type: ignore[union-attr]
    gate.close(opened_ns + 7_000_000)
    assert (reader.shut, reader.open_ns()) == (True, 12_000_000)

"""Room for the main job: what a worker is given, and what it is told when the main job grows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.fill.agent.ending import Ending, How, NotStarted
from megatron.fill.agent.memory import DeviceMemory, MemoryShare
from megatron.fill.device.port import MIB, Limits
from megatron.fill.profiles import BubbleCycle, BubbleSlot
from megatron.fill.status import Cause, JobState, Status
from megatron.fill.types import BubbleKind
from tests.support.clock import Clock
from tests.support.fake_device import FakeDevice, FakeMachine, free_memory

MARGIN = 100 * MIB


def cycle(*free_mib: int) -> BubbleCycle:
    return BubbleCycle(10**9, tuple(BubbleSlot(BubbleKind.FILL, 10**6, free * MIB) for free in free_mib))


def test_the_cap_is_what_was_asked_for_or_what_the_cycle_leaves():
    memory = free_memory(1000 * MIB, MARGIN)
    assert memory.cap(50 * MIB, cycle(900, 800)) == 50 * MIB
    assert memory.cap(None, cycle(900, 800)) == 700 * MIB
    assert memory.cap(None, None) == 900 * MIB


def test_memory_that_was_free_some_time_ago_does_not_count():
    memory = free_memory(300 * MIB, MARGIN)  # the main job has grown since the cycle was shown
    assert memory.cap(None, cycle(900, 800)) == 200 * MIB


def test_memory_that_is_free_at_this_moment_alone_does_not_count():
    memory = free_memory(1000 * MIB, MARGIN)  # as while optimizer state is in host memory
    assert memory.cap(None, cycle(900, 200)) == 100 * MIB


def test_a_job_that_asks_for_more_than_there_is_waits():
    with pytest.raises(NotStarted) as refused:
        free_memory(300 * MIB, MARGIN).cap(500 * MIB, cycle(400, 500))
    reason = "it asks for 500 MiB, and the main job leaves 200 MiB"
    assert refused.value.status == Status(JobState.QUEUED, Cause.NO_MEMORY, reason)
    with pytest.raises(NotStarted):
        free_memory(300 * MIB, 400 * MIB).cap(None, cycle(300))


def test_the_overhead_of_a_process_comes_on_top():
    assert free_memory(300 * MIB, MARGIN, 50 * MIB).cap(None, cycle(300)) == 150 * MIB


amounts = st.integers(min_value=0, max_value=100_000 * MIB)


@given(st.none() | st.integers(1, 100_000 * MIB), st.none() | st.lists(amounts, max_size=8), amounts, amounts, amounts)
def test_a_cap_leaves_the_margin_in_every_bubble(asked, cycle_free, now, margin, others):
    memory = free_memory(now, margin)
    shown = None
    if cycle_free is not None:
        shown = BubbleCycle(10**9, tuple(BubbleSlot(BubbleKind.FILL, 10**6, free) for free in cycle_free))
    with MemoryShare(memory, memory.device.limiter(Limits(), "job"), others, lambda size: None, lambda: False):
        try:
            found = memory.cap(asked, shown)
        except NotStarted:
            found = 0
    least = min([now, *(cycle_free or [])])
    if not found:
        assert least < margin + others + (asked or 1)
    else:
        assert least - found - others >= margin
        assert found == (asked or least - margin - others)


def test_a_refusal_says_what_there_is():
    memory = free_memory(3072 * MIB, 1024 * MIB)
    share = MemoryShare(memory, memory.device.limiter(Limits(), "job"), 512 * MIB, lambda size: None, lambda: False)
    with share, pytest.raises(NotStarted) as refused:
        memory.cap(1024 * MIB, cycle(3072, 1024))
    assert "leaves 1024 MiB free" in refused.value.status.text
    assert "512 MiB of other jobs" in refused.value.status.text


class Bench:
    def __init__(self, patience_s: float = 60.0) -> None:
        self.device = FakeDevice(FakeMachine(1000 * MIB))
        self.machine = self.device.machine
        self.worker = self.machine.start(600 * MIB)
        self.limiter = self.device.limiter(Limits(None), "job")
        self.limiter.adopt(self.worker)
        self.wanted: list[int | None] = []
        self.shrinking = False
        memory, self.clock = DeviceMemory(self.device, MARGIN, patience_s), Clock(100.0)
        self.room = MemoryShare(memory, self.limiter, 700 * MIB, self.wanted.append, lambda: self.shrinking, self.clock)
        self.main_job = self.machine.start()

    def look(self, main_job_mib: int) -> Ending | None:
        self.machine.processes[self.main_job].held_bytes = main_job_mib * MIB
        self.limiter.look()
        return self.room.look()


def test_all_is_well_while_the_margin_is_free():
    bench = Bench()
    assert bench.look(300) is None
    assert bench.wanted == []
    assert bench.room.unused_promise_bytes == 100 * MIB


def test_a_growth_is_answered_with_shrinking():
    bench = Bench()
    assert bench.look(340) is None
    assert bench.wanted == [560 * MIB]
    bench.machine.processes[bench.worker].held_bytes = 500 * MIB
    assert bench.look(340) is None


def test_one_that_is_at_it_is_only_reminded():
    """While it copies what it keeps, it holds more; that is not to be given back too."""
    bench = Bench()
    assert bench.look(340) is None
    bench.shrinking = True
    bench.machine.processes[bench.worker].held_bytes = 620 * MIB
    assert bench.look(340) is None
    bench.shrinking = False
    bench.machine.processes[bench.worker].held_bytes = 570 * MIB
    assert bench.look(340) is None
    assert bench.wanted == [560 * MIB, None, 560 * MIB]


def test_one_that_does_not_shrink_is_stopped():
    bench = Bench(patience_s=0.0)
    ending = bench.look(340)
    assert ending is not None
    assert ending.how is How.STOP
    assert ending.detail.startswith("the main job needs the memory: 60 MiB free of a margin of 100 MiB")
    assert bench.look(300) is ending  # decided once


def test_one_has_its_time_to_shrink_anew_whenever_the_margin_was_free_again():
    bench = Bench(patience_s=1.0)
    for main_job_mib in (340, 300, 340):
        bench.clock.now += 0.9
        assert bench.look(main_job_mib) is None
    assert bench.wanted == [560 * MIB] * 2
    bench.clock.now += 1.1
    ending = bench.look(340)
    assert ending is not None
    assert ending.how is How.STOP
    assert ending.detail.endswith("did not shrink within 1 s")


def test_there_is_no_asking_below_a_quarter_of_the_margin():
    bench = Bench()
    assert bench.look(375) is None
    ending = bench.look(376)
    assert ending is not None
    assert ending.how is How.CUT


@given(amounts, st.lists(st.tuples(amounts, amounts, st.floats(0, 3)), min_size=1, max_size=30))
def test_the_margin_is_never_eaten_for_longer_than_the_patience(margin, looks):
    clock, since_s = Clock(100.0), None
    wanted: list[Any] = []
    limiter: Any = SimpleNamespace(held_bytes=0)
    machine = FakeMachine()
    share = MemoryShare(DeviceMemory(FakeDevice(machine), margin, 1.0), limiter, 0, wanted.append, lambda: False, clock)
    for free, held, passed_s in looks:
        clock.now += passed_s
        machine.total_bytes, limiter.held_bytes = free, held
        wanted.clear()
        ending = share.look()
        short = free < margin and held > 0
        since_s = (clock.now if since_s is None else since_s) if short else None
        if short and free * 4 < margin:
            assert ending is not None
            assert ending.how is How.CUT
        elif since_s is not None and clock.now - since_s >= 1:
            assert ending is not None
            assert ending.how is How.STOP
        else:
            assert ending is None
            assert bool(wanted) == short
        if ending is not None:
            break  # decided once
        for to_bytes in wanted:
            assert 0 <= to_bytes < held
            assert free + held - to_bytes >= margin or to_bytes == 0


def test_a_sudden_growth_ends_the_worker():
    bench = Bench()
    ending = bench.look(390)
    assert ending is not None
    assert ending.how is How.CUT
    assert ending.detail.startswith("the main job needs the memory: 10 MiB free of a margin of 100 MiB")


def test_what_a_worker_was_promised_is_not_promised_again_while_it_runs():
    device = FakeDevice(FakeMachine(1000 * MIB))
    memory = DeviceMemory(device, MARGIN, 1.0)
    limiter = device.limiter(Limits(None), "job")
    with MemoryShare(memory, limiter, 300 * MIB, lambda size: None, lambda: False) as share:
        assert share.unused_promise_bytes == 300 * MIB
        assert memory.room_bytes(cycle(1000)) == 600 * MIB
        with pytest.raises(NotStarted):
            memory.cap(700 * MIB, None)
    assert memory.room_bytes(cycle(1000)) == 900 * MIB


def test_how_long_a_worker_has_to_shrink_is_the_memorys_to_say():
    device = FakeDevice(FakeMachine(1000 * MIB))
    limiter = device.limiter(Limits(None), "job")
    limiter.adopt(device.machine.start(950 * MIB))
    limiter.look()
    for patience_s, how in ((0.0, How.STOP), (60.0, None)):
        memory = DeviceMemory(device, MARGIN, patience_s)
        with MemoryShare(memory, limiter, 0, lambda size: None, lambda: False) as share:
            ending = share.look()
            assert (ending and ending.how) is how

"""Room for the main job: what a worker is given, and what it is told when the main job grows."""

from __future__ import annotations

from megatron.fill.agent.ending import Ending, How
from megatron.fill.agent.memory import DeviceMemory, MemoryShare, worker_cap
from megatron.fill.device.port import MIB, Limits
from megatron.fill.device.pressure import MemoryGuard, NoRoom
from megatron.fill.profiles import BubbleCycle, BubbleSlot
from megatron.fill.types import BubbleKind
from tests.support.fake_device import FakeDevice, FakeMachine

MARGIN = 100 * MIB


def cycle(*free_mib: int) -> BubbleCycle:
    return BubbleCycle(10**9, tuple(BubbleSlot(BubbleKind.FILL, 10**6, free * MIB) for free in free_mib))


def test_the_cap_is_what_was_asked_for_or_what_the_cycle_leaves():
    device = FakeDevice(FakeMachine(1000 * MIB))
    assert worker_cap(50 * MIB, device, cycle(900, 800), MARGIN, 0) == 50 * MIB
    assert worker_cap(None, device, cycle(900, 800), MARGIN, 0) == 700 * MIB
    assert worker_cap(None, device, cycle(900, 800), MARGIN, 200 * MIB) == 500 * MIB
    assert worker_cap(None, device, None, MARGIN, 0) == 900 * MIB


def test_memory_that_was_free_some_time_ago_does_not_count():
    device = FakeDevice(FakeMachine(300 * MIB))  # the main job has grown since the cycle was shown
    assert worker_cap(None, device, cycle(900, 800), MARGIN, 0) == 200 * MIB


def test_memory_that_is_free_at_this_moment_alone_does_not_count():
    device = FakeDevice(FakeMachine(1000 * MIB))  # as while optimizer state is in host memory
    assert worker_cap(None, device, cycle(900, 200), MARGIN, 0) == 100 * MIB


def test_a_job_that_asks_for_more_than_there_is_waits():
    device = FakeDevice(FakeMachine(300 * MIB))
    refused = worker_cap(500 * MIB, device, cycle(400, 500), MARGIN, 0)
    assert refused == NoRoom("it asks for 500 MiB, and the main job leaves 200 MiB")
    assert isinstance(worker_cap(None, device, cycle(300), 400 * MIB, 0), NoRoom)


def test_the_overhead_of_a_process_comes_on_top():
    device = FakeDevice(FakeMachine(300 * MIB), overhead_bytes=50 * MIB)
    assert worker_cap(None, device, cycle(300), MARGIN, 0) == 150 * MIB


class Bench:
    def __init__(self, patience_s: float = 60.0) -> None:
        self.device = FakeDevice(FakeMachine(1000 * MIB))
        self.machine = self.device.machine
        self.worker = self.machine.start(600 * MIB)
        self.limiter = self.device.limiter(Limits(None), "job")
        self.limiter.adopt(self.worker)
        self.wanted: list[int | None] = []
        self.shrinking = False
        guard = MemoryGuard(MARGIN, patience_s)
        self.room = MemoryShare(self.device, self.limiter, 700 * MIB, guard, self.wanted.append, lambda: self.shrinking)
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
    with memory.shared(limiter, 300 * MIB, lambda size: None, lambda: False) as share:
        assert share.unused_promise_bytes == 300 * MIB
        assert memory.room_bytes(cycle(1000)) == 600 * MIB
        assert isinstance(memory.cap(700 * MIB, None), NoRoom)
    assert memory.room_bytes(cycle(1000)) == 900 * MIB


def test_how_long_a_worker_has_to_shrink_is_the_memorys_to_say():
    device = FakeDevice(FakeMachine(1000 * MIB))
    limiter = device.limiter(Limits(None), "job")
    limiter.adopt(device.machine.start(950 * MIB))
    limiter.look()
    for patience_s, how in ((0.0, How.STOP), (60.0, None)):
        memory = DeviceMemory(device, MARGIN, patience_s)
        with memory.shared(limiter, 0, lambda size: None, lambda: False) as share:
            ending = share.look()
            assert (ending and ending.how) is how

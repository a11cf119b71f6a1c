"""How much memory a worker may have, and when it has to give it back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron.fill.device.pressure import MemoryGuard, NoRoom, Order, cap
from megatron.fill.linux.host import FreeHostMemory
from tests.support.clock import Clock

GIB = 2**30


def test_a_worker_is_asked_then_stopped():
    clock = Clock(100.0)
    guard = MemoryGuard(8 * GIB, 1.0, clock=clock)
    assert guard.judge(8 * GIB, 4 * GIB).order is Order.OK
    asked = guard.judge(5 * GIB, 4 * GIB)
    assert (asked.order, asked.held_bytes) == (Order.SHRINK, GIB)
    assert "5120 MiB free of a margin of 8192 MiB" in asked.reason
    clock.now += 0.9
    assert guard.judge(5 * GIB, 4 * GIB).order is Order.SHRINK
    clock.now += 0.2
    stopped = guard.judge(5 * GIB, 4 * GIB)
    assert stopped.order is Order.STOP
    assert "did not shrink within 1 s" in stopped.reason


def test_a_worker_that_shrank_has_its_second_again():
    clock = Clock(100.0)
    guard = MemoryGuard(8 * GIB, 1.0, clock=clock)
    assert guard.judge(5 * GIB, 4 * GIB).order is Order.SHRINK
    clock.now += 0.9
    assert guard.judge(8 * GIB, GIB).order is Order.OK
    clock.now += 0.9
    assert guard.judge(7 * GIB, GIB).order is Order.SHRINK


def test_there_is_no_asking_below_a_quarter_of_the_margin():
    guard = MemoryGuard(8 * GIB, 1.0, clock=Clock(100.0))
    assert guard.judge(2 * GIB, 1).order is Order.SHRINK
    assert guard.judge(2 * GIB - 1, 1).order is Order.KILL


amounts = st.integers(min_value=0, max_value=100 * GIB)


@given(amounts, st.lists(st.tuples(amounts, amounts, st.floats(0, 3)), min_size=1, max_size=30))
def test_the_margin_is_never_eaten_for_longer_than_the_patience(margin, looks):
    clock = Clock(100.0)
    guard = MemoryGuard(margin, 1.0, clock=clock)
    since_s = None
    for free, held, passed_s in looks:
        clock.now += passed_s
        verdict = guard.judge(free, held)
        short = free < margin and held > 0
        since_s = (clock.now if since_s is None else since_s) if short else None
        assert (verdict.order is Order.OK) == (not short)
        assert bool(verdict.reason) == short
        if short and free * 4 < margin:
            assert verdict.order is Order.KILL
        elif since_s is not None and clock.now - since_s >= 1:
            assert verdict.order is Order.STOP
        if verdict.order is Order.SHRINK:
            assert verdict.held_bytes is not None
            assert 0 <= verdict.held_bytes < held
            freed = held - verdict.held_bytes
            assert free + freed >= margin or verdict.held_bytes == 0


@given(st.none() | st.integers(1, 100 * GIB), amounts, amounts, amounts)
def test_a_cap_leaves_the_margin(asked, free, margin, others):
    found = cap(asked, free, margin, others)
    if isinstance(found, NoRoom):
        assert free <= margin + others
    else:
        assert found > 0
        assert free - found - others >= margin
        assert asked is None or found <= asked


def test_a_refusal_says_what_there_is():
    refusal = cap(GIB, GIB, GIB, GIB // 2)
    assert isinstance(refusal, NoRoom)
    assert "leaves 1024 MiB free" in refusal.reason
    assert "512 MiB of other jobs" in refusal.reason


def test_free_memory_is_read_anew_unless_a_reading_may_hold_for_a_while(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable:    1000 kB\n")
    fresh, resting = FreeHostMemory(meminfo=str(meminfo)), FreeHostMemory(rest_s=3600, meminfo=str(meminfo))
    assert (fresh(), resting()) == (1000 * 1024, 1000 * 1024)
    with meminfo.open("r+") as file:
        file.write("MemTotal: 9000 kB\nMemAvailable:    2000 kB\n")
    assert (fresh(), resting()) == (2000 * 1024, 1000 * 1024)

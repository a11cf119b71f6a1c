"""The cycle board and the baton: shared memory between a rank, its agent and two workers."""

from __future__ import annotations

import os
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.fill.pages.baton import Baton, TailGate
from megatron.fill.pages.board import CycleBoard, CycleBoardReader
from megatron.fill.pages.gate import SharedGate, SharedGateReader
from megatron.fill.profiles import BubbleCycle, BubbleSlot
from megatron.fill.types import BubbleKind

slots = st.builds(BubbleSlot, st.sampled_from(BubbleKind), st.integers(0, 10**12), st.integers(0, 2**45))
cycles = st.builds(BubbleCycle, st.integers(0, 10**12), st.lists(slots, max_size=70).map(tuple))


@given(st.lists(cycles, min_size=1, max_size=3))
def test_the_board_shows_the_last_cycle(shown):
    board = CycleBoard()
    fd = board.reader_fd()
    reader = CycleBoardReader(fd)
    os.close(fd)
    assert reader.read() is None
    versions = [reader.version]
    for cycle in shown:
        board.show(cycle)
        assert reader.read() == cycle
        versions.append(reader.version)
    assert versions == sorted(set(versions))
    os.close(board.fd)


def test_a_cycle_that_is_too_long_is_cut_and_readers_cannot_write():
    board = CycleBoard()
    fd = board.reader_fd()
    long = BubbleCycle(7, (BubbleSlot(BubbleKind.FILL, 1, 2),) * 3000)
    board.show(long)
    cut = CycleBoardReader(fd).read()
    assert cut is not None
    assert cut.slots == long.slots[: len(cut.slots)]
    assert 1000 < len(cut.slots) < 3000
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(fd, b"x", 0)


class Pair:
    """A gate, and the resident job's and the tail job's views of it."""

    def __init__(self) -> None:
        self.gate = SharedGate()
        self.resident = SharedGateReader(self.gate.reader_fd())
        fd = Baton.create()
        self.baton = Baton(fd)
        self.tail = TailGate(self.gate.reader_fd(), Baton(fd))

    def open(self) -> int:
        return self.gate.open(time.monotonic_ns() + 10**9, 5)


def test_without_a_resident_job_the_tail_job_gets_every_bubble():
    pair = Pair()
    seq = pair.open()
    bubble = pair.tail.wait(0)
    assert bubble is not None
    assert bubble.seq == seq


def test_no_whole_bubble_was_the_tail_jobs():
    pair = Pair()
    pair.open()
    pair.gate.close(time.monotonic_ns())
    assert len(pair.resident.over_since(0, time.monotonic_ns())) == 1
    assert pair.tail.over_since(0, time.monotonic_ns()) == []


def test_the_tail_job_waits_until_the_bubble_is_passed_on():
    pair = Pair()
    pair.baton.hold()
    got: list[int] = []

    def wait() -> None:
        bubble = None
        while bubble is None:
            bubble = pair.tail.wait(0)
        got.append(bubble.seq)

    seq = pair.open()
    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    assert got == []
    pair.baton.pass_on(seq)
    thread.join(60)
    assert got == [seq]
    assert pair.tail.is_open(seq)


def test_a_bubble_passed_on_too_late_is_not_given():
    pair = Pair()
    pair.baton.hold()
    seq = pair.open()
    pair.gate.close(time.monotonic_ns())
    pair.baton.pass_on(seq)
    assert pair.tail.wait(0) is None
    later = pair.open()
    pair.baton.pass_on(later)
    bubble = pair.tail.wait(seq)
    assert bubble is not None
    assert bubble.seq == later


def test_the_tail_job_hears_of_the_resident_jobs_end():
    pair = Pair()
    pair.baton.hold()
    seq = pair.open()
    dropper = threading.Timer(0.1, pair.baton.drop)
    dropper.start()
    bubble = None
    while bubble is None:
        bubble = pair.tail.wait(0)
    assert bubble.seq == seq


def test_the_end_of_the_main_job_is_seen_by_the_tail_job():
    pair = Pair()
    pair.baton.hold()
    assert not pair.tail.ended
    pair.gate.end()
    assert pair.tail.ended

"""The relay as a process: real semaphores, a real gate, a thread as the GPU; and what happens when one of them goes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.fill.hooks import BubbleBus
from megatron.fill.pages.board import CycleBoard, CycleBoardReader
from megatron.fill.pages.control import ControlPage, RunState
from megatron.fill.pages.gate import OpenBubble, SharedGate, SharedGateReader
from megatron.fill.pages.ring import Ring
from megatron.fill.rank.relay import RelayProcess, RelaySpec
from megatron.fill.rank.rule import FillRule
from megatron.fill.rank.spec import RankSpec
from megatron.fill.rank.stream import StreamListener
from megatron.fill.records.rank import read_rank
from megatron.fill.types import CycleKey, RankInfo
from tests.support.fake_stream import MS, ThreadStream

INFO = RankInfo(0, 2, 0, 2, 0, 1, 0, 2, device="cuda:0")
pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("own_pages")]


class Rank:
    """A rank with its relay; ``stream`` is its GPU."""

    def __init__(self, folder: Path) -> None:
        self.gate, self.board, ring = SharedGate(), CycleBoard(), Ring()
        self.record, self.log = folder / "rank0.json", folder / "relay.log"
        self.control = ControlPage.create(0)
        spec = RelaySpec(
            RankSpec(INFO, str(self.record), FillRule(warmup=3, margin=0.0), max_slowdown=0.9),
            os.getpid(),
            ring.fd,
            self.gate.fd,
            self.board.fd,
            self.control.reader_fd(),
        )
        self.relay = RelayProcess(spec, ring, self.gate, self.log)
        assert self.relay.wait_ready(), self.log.read_text()
        self.stream = ThreadStream(ring.semaphore)
        self.listener = StreamListener(ring, self.stream, lambda: 0, self.relay.alive, self.relay.shut)
        self.bus = BubbleBus()
        self.bus.listener = self.listener
        self.reader = SharedGateReader(self.gate.reader_fd())

    def iteration(self, number: int, received: threading.Event | None = None) -> None:
        """Enqueue an iteration: 10 ms of compute, then a receive that takes 100 ms, and ends after ``received``."""
        self.bus.begin_iteration(number)
        self.bus.begin_schedule(CycleKey("1f1b", 1))
        self.stream.compute(10)
        self.bus.forward(0)
        self.bus.open(for_backward=True)
        self.stream.compute(100)  # for the stream, a receive is time that passes
        if received is not None:
            self.stream.wait_for(received)
        self.bus.close()
        self.bus.end_iteration()

    def pid(self) -> int:
        return self.relay._process.pid


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    rank = Rank(tmp_path)
    yield rank
    rank.stream.close()
    rank.relay.kill()


def wait_ended(reader: SharedGateReader, timeout_s: float = 30.0) -> bool:
    until = time.monotonic() + timeout_s
    while not reader.ended and time.monotonic() < until:
        time.sleep(0.005)
    return reader.ended


def test_a_worker_sees_bubbles_when_the_device_is_there_and_the_record_is_what_it_did(rank):
    board = CycleBoardReader(rank.board.reader_fd())
    received = [threading.Event() for _ in range(4)]  # when the worker has seen the bubble, however slow it is
    numbers = range(8, 15)  # none of which the brake leaves unfilled
    for place, number in enumerate(numbers, 1):  # all of it is enqueued at once: the device needs 0.8 s for it
        rank.iteration(number, received[place - 4] if place > 3 else None)
    seen: list[OpenBubble] = []
    while len(seen) < 4:
        bubble = rank.reader.wait(seen[-1].seq if seen else 0)
        if bubble is not None:
            received[len(seen)].set()
            seen.append(bubble)
    rank.listener.end()
    assert rank.relay.finish()
    marks = rank.stream.marked_ns
    per_iteration = 6  # iteration, cycle, forward, open, close, iteration
    assert len(marks) == 7 * per_iteration + 1
    opened, closed = marks[3::per_iteration], marks[4::per_iteration]
    record = read_rank(rank.record)
    for bubble, start_ns, end_ns in zip(record.bubbles, opened, closed, strict=True):
        assert start_ns <= bubble.start_ns
        assert end_ns <= bubble.end_ns
    for bubble, end_ns in zip(record.bubbles[3:], closed[3:], strict=True):
        assert bubble.start_ns < end_ns <= bubble.end_ns
    assert [bubble.seq for bubble in record.bubbles] == [0, 0, 0, 1, 2, 3, 4]
    for bubble, recorded in zip(seen, record.bubbles[3:], strict=True):
        assert bubble.deadline_ns == recorded.start_ns + recorded.predicted_ns
        assert rank.reader.closed_ns(bubble.seq) == recorded.end_ns
        assert bubble.free_bytes == 0  # no driver was asked
    assert [one.iteration for one in record.iterations] == [*numbers]
    assert {span.name for span in record.spans} == {"forward"}
    assert record.info == INFO
    cycle = board.read()
    assert cycle is not None
    assert len(cycle.slots) == 1

    # The gate is the rank's again, and goes on where the relay stopped.
    assert not rank.reader.ended
    assert rank.gate.open_alone(time.monotonic_ns() + MS) == 5
    rank.gate.end()
    assert rank.reader.ended


def test_a_killed_relay_ends_the_gate_and_nothing_else(rank):
    for number in range(1, 6):
        rank.iteration(number)
    os.kill(rank.pid(), signal.SIGKILL)
    while rank.relay.alive():
        time.sleep(0.002)
    rank.iteration(6)
    assert rank.bus.listener is None  # noticed with the next iteration
    assert rank.reader.ended
    assert rank.reader.wait(0) is None
    rank.iteration(7)
    rank.listener.end()
    assert not rank.relay.finish()


def test_after_a_failure_in_the_rank_the_relay_ends_the_gate_and_keeps_the_record(rank):
    for number in range(1, 4):
        rank.iteration(number)
    while len(rank.stream.marked_ns) < 18:
        time.sleep(0.005)
    time.sleep(0.05)
    rank.listener._mark = lambda: 1 // 0
    rank.iteration(4)
    assert rank.bus.listener is None
    assert wait_ended(rank.reader)
    rank.listener.end()
    assert rank.relay.finish()
    assert len(read_rank(rank.record).bubbles) == 3


def test_a_relay_that_hangs_is_not_waited_for(rank):
    rank.iteration(1)
    os.kill(rank.pid(), signal.SIGSTOP)
    rank.listener.end()
    assert not rank.relay.finish(timeout_s=0.2)
    assert rank.reader.ended


def test_an_operator_s_pause_is_seen(rank):
    rank.control.change(RunState.PAUSED)
    for number in range(1, 6):
        rank.iteration(number)
    rank.listener.end()
    assert rank.relay.finish()
    assert [bubble.seq for bubble in read_rank(rank.record).bubbles] == [0] * 5


def test_the_end_waits_until_the_relay_has_caught_up(rank):
    for number in range(1, 4):
        rank.iteration(number)
    rank.listener.end()
    assert rank.relay.finish()
    assert len(read_rank(rank.record).bubbles) == 3


def test_a_relay_that_cannot_start_is_noticed(tmp_path):
    gate, ring = SharedGate(), Ring()
    spec = RelaySpec(RankSpec(INFO, str(tmp_path / "rank0.json"), FillRule()), os.getpid(), gate.fd, gate.fd)
    relay = RelayProcess(spec, ring, gate, tmp_path / "relay.log")
    assert not relay.wait_ready()
    assert not relay.finish()
    assert "cannot be mapped as a ring" in (tmp_path / "relay.log").read_text()
    assert SharedGateReader(gate.reader_fd()).ended


def test_the_relay_dies_with_its_rank(tmp_path):
    code = """
import os, signal, sys
from pathlib import Path
from tests.unit.rank.test_stream_relay import Rank
print(Rank(Path(sys.argv[1])).pid(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, check=False)
    relay = Path(f"/proc/{int(done.stdout)}/stat")
    until = time.monotonic() + 30
    while relay.exists() and relay.read_text().split(") ")[1][0] != "Z" and time.monotonic() < until:
        time.sleep(0.01)
    assert not relay.exists() or relay.read_text().split(") ")[1][0] == "Z"

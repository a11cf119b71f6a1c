"""Bubbles that the author of a schedule marks by hand."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

import megatron.fill
from megatron.fill.hooks import bus
from megatron.fill.pages.board import CycleBoard, CycleBoardReader
from megatron.fill.pages.gate import SharedGate, SharedGateReader
from megatron.fill.pages.ring import Fact, Ring, RingReader
from megatron.fill.rank.listener import RankListener
from megatron.fill.rank.predictor import BubblePredictor
from megatron.fill.rank.recorder import Recorder
from megatron.fill.rank.rule import FillRule
from megatron.fill.rank.stream import StreamListener
from megatron.fill.types import BubbleKind, CycleKey, RankInfo

MS = 1_000_000
GIB = 1 << 30
FOUND = 7  # bytes that are found to be free
INFO = RankInfo(0, 2, 0, 2, 0, 1, 0, 2)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of the bus: each look at it is 10 ms later."""
    looks = count(0, 10 * MS)
    monkeypatch.setattr(bus, "clock", lambda: next(looks))
    yield
    bus.listener = None
    bus.end_iteration()


@pytest.fixture
def rank() -> RankListener:
    listener = RankListener(
        SharedGate(), Recorder(INFO, 3), BubblePredictor(FillRule(warmup=2)), lambda: FOUND, board=CycleBoard()
    )
    bus.listener = listener
    return listener


def own_schedule(gate: SharedGateReader | None = None) -> list[Any]:
    """A schedule that no patch knows; what the gate says in each of its bubbles."""
    seen = []
    for kind, free_bytes in (("fill", None), ("interior", GIB), (BubbleKind.DRAIN, None)):
        bus.forward(0)  # the passes are Megatron's, and told
        with megatron.fill.bubble(kind, free_bytes=free_bytes):
            if gate is not None:
                seen.append(gate.wait(0))
        bus.backward(0)
    return seen


def test_a_schedule_of_ones_own_is_filled_and_the_promise_reaches_the_gate_and_the_board(rank):
    for iteration in (1, 2):
        bus.begin_iteration(iteration)
        own_schedule()
        bus.end_iteration()
    bus.begin_iteration(3)
    seen = own_schedule(SharedGateReader(rank.gate.reader_fd()))
    assert not bus.in_drain
    bus.end_iteration()
    assert [(bubble.seq, bubble.free_bytes) for bubble in seen] == [(1, FOUND), (2, GIB), (3, FOUND)]
    bubbles = rank.recorder.bubbles[-3:]
    assert [bubble.kind for bubble in bubbles] == ["fill", "interior", "drain"]
    assert [(bubble.index, bubble.duration_ns, bubble.predicted_ns) for bubble in bubbles] == [
        (index, 10 * MS, 10 * MS) for index in range(3)
    ]
    shown = CycleBoardReader(rank.board.reader_fd()).read()
    assert shown is not None
    assert [slot.free_bytes for slot in shown.slots] == [FOUND, GIB, FOUND]


def test_waits_inside_are_the_same_bubble_and_waits_elsewhere_their_own(rank):
    bus.begin_iteration(1)
    bus.begin_schedule(CycleKey("1f1b", 1))
    with megatron.fill.bubble("interior"):
        bus.open()
        bus.close()
        with megatron.fill.bubble("drain"):
            bus.open()
            bus.close()
    bus.open()
    with megatron.fill.bubble("drain"):
        pass
    bus.close()
    bus.end_iteration()
    assert [(bubble.kind, bubble.index) for bubble in rank.recorder.bubbles] == [("interior", 0), ("fill", 1)]


def test_a_block_that_raises_ends_its_bubble(rank):
    bus.begin_iteration(1)
    with pytest.raises(RuntimeError, match="its own"), megatron.fill.bubble("interior"):
        raise RuntimeError("its own")
    assert len(rank.recorder.bubbles) == 1


def test_outside_of_iterations_there_are_none_and_without_a_listener_nothing_happens(rank):
    with megatron.fill.bubble("interior"):
        pass
    assert rank.recorder.bubbles == []
    bus.listener = None
    bus.begin_iteration(1)
    assert own_schedule() == []


@pytest.mark.parametrize(
    ("kind", "free_bytes", "message"),
    [
        ("idle", None, "no bubble of kind 'idle'; expected one of fill, fwd-bwd, interior, drain"),
        ("fill", -1, "free_bytes is -1: expected 0 or more bytes"),
    ],
)
def test_what_is_wrong_is_said_though_nobody_listens(kind, free_bytes, message):
    with pytest.raises(ValueError, match=message), megatron.fill.bubble(kind, free_bytes=free_bytes):
        pass


def test_the_promise_goes_through_the_ring():
    class Marks:
        def mark(self) -> None:
            """The device is never there."""

    ring = Ring()
    reader = RingReader(ring.fd)
    bus.listener = StreamListener(ring, Marks())
    bus.begin_iteration(1)
    own_schedule()
    entries = [entry for _ in range(20) for entry in reader.take()]
    assert [entry.amount for entry in entries if entry.fact is Fact.BUBBLE_OPENED] == [-1, GIB, -1]

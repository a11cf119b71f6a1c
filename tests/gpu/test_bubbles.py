"""Bubbles on a real CUDA stream: opened at GPU time, at a cost that the compute does not notice, without Python."""

from __future__ import annotations

import ctypes
import threading
import time

import pytest
import torch

from megatron.fill.errors import FillError
from megatron.fill.hooks import BubbleBus
from megatron.fill.pages.ring import Ring, RingReader
from megatron.fill.rank.listener import RankListener
from megatron.fill.rank.predictor import BubblePredictor
from megatron.fill.rank.recorder import Recorder
from megatron.fill.rank.relay import FreeMemory, Relay
from megatron.fill.rank.rule import FillRule
from megatron.fill.rank.signals import PostedSignals, WrittenSignals, cuda_signals, stream_cost_us
from megatron.fill.rank.stream import StreamListener
from megatron.fill.types import CycleKey, RankInfo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MS = 1_000_000
SPIN = 50_000_000  # cycles: tens of milliseconds on any GPU


@pytest.fixture(autouse=True, scope="module")
def warm_clocks() -> None:
    """A spin is of so many cycles, and an idle GPU's clock is a fraction of a busy one's."""
    until_s = time.monotonic() + 1
    while time.monotonic() < until_s:
        torch.cuda._sleep(SPIN)
        torch.cuda.synchronize()


def spin_ns() -> int:
    """How long SPIN cycles take now."""
    torch.cuda.synchronize()
    start_ns = time.monotonic_ns()
    torch.cuda._sleep(SPIN)
    torch.cuda.synchronize()
    return time.monotonic_ns() - start_ns


class Timed:
    """A rank's listener with real signals, and its relay in a thread."""

    def __init__(self) -> None:
        ring = Ring()
        self.recorder = Recorder(RankInfo(0, 2, 0, 2, 0, 1, 0, 2, device="cuda:0"), 3)
        free = FreeMemory(lambda: 7)
        listener = RankListener(None, self.recorder, BubblePredictor(FillRule()), free)
        self.relay = Relay(RingReader(ring.fd), listener, free)
        self.listener = StreamListener(ring, cuda_signals("cuda:0", ring))
        self.bus = BubbleBus()
        self.bus.listener = self.listener
        self.thread = threading.Thread(target=self.relay.run, daemon=True)
        self.thread.start()

    def end(self) -> None:
        self.listener.end()
        self.thread.join(20)
        assert self.relay.ended


def test_a_bubble_opens_and_closes_when_the_gpu_is_there():
    usual_ns = min(spin_ns() for _ in range(3))
    timed = Timed()
    begun_ns = time.monotonic_ns()
    timed.bus.begin_iteration(1)
    timed.bus.begin_schedule(CycleKey("1f1b", 1))
    torch.cuda._sleep(SPIN)
    timed.bus.open()
    torch.cuda._sleep(2 * SPIN)  # for the stream, a receive is time that passes
    timed.bus.close()
    enqueued_ns = time.monotonic_ns()
    timed.bus.end_iteration()
    timed.end()
    (bubble,) = timed.recorder.bubbles
    assert enqueued_ns - begun_ns < usual_ns  # the host was far ahead
    assert bubble.start_ns - begun_ns == pytest.approx(usual_ns, rel=0.2, abs=MS)
    assert bubble.duration_ns == pytest.approx(2 * usual_ns, rel=0.2, abs=MS)


def test_the_chosen_kind_of_signal_costs_the_main_stream_less_than_10_us():
    signals = cuda_signals("cuda:0", Ring())
    cost_us = sorted(stream_cost_us("cuda:0", signals) for _ in range(5))[2]
    print(f"a signal by {type(signals).__name__} takes {cost_us:.2f} us of the main stream")
    assert cost_us < 10


@pytest.mark.parametrize("way", [WrittenSignals, PostedSignals])
def test_signals_need_no_python(way):
    """They come while this process's interpreter lock is held and the main thread stands in C."""
    ring = Ring()
    reader = RingReader(ring.fd)
    signals = way("cuda:0", ring)
    holding = ctypes.PyDLL(None)  # calls through it keep the interpreter lock
    torch.cuda._sleep(SPIN)
    signals.mark()
    holding.usleep(500_000)
    start_ns = time.monotonic_ns()
    reader.wait()  # posted already, although no Python could run
    assert time.monotonic_ns() - start_ns < MS


@pytest.mark.parametrize("way", [WrittenSignals, PostedSignals])
def test_marks_inside_a_graph_capture_are_refused(way):
    ring = Ring()
    signals = way("cuda:0", ring)
    tiny = torch.zeros(1, device="cuda:0")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tiny.add_(1)
        with pytest.raises(FillError, match="CUDA graph"):
            signals.mark()
    graph.replay()
    torch.cuda.synchronize()
    assert tiny.item() == 1

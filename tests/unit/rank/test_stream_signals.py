"""What marks ask of the driver, in which order: over a stand-in for the driver, without a device."""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.fill.errors import FillError
from megatron.fill.pages.ring import Ring, RingReader
from megatron.fill.rank import signals

COMPUTE, OURS, EVENT = 0x1000, 0x2000, 0x3000


class StandInDriver:
    """Notes the calls; runs host functions at once, as if all work were done."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.capturing = 0
        self.code = 0

    def cuCtxGetStreamPriorityRange(self, least: Any, greatest: Any) -> int:
        greatest._obj.value = -5
        return 0

    def cuStreamCreateWithPriority(self, stream: Any, flags: int, priority: Any) -> int:
        self.calls.append(("create", flags, priority.value))
        stream._obj.value = OURS
        return self.code

    def cuEventCreate(self, event: Any, flags: int) -> int:
        event._obj.value = EVENT
        return 0

    def cuStreamIsCapturing(self, stream: Any, status: Any) -> int:
        status._obj.value = self.capturing
        return 0

    def cuEventRecord(self, event: Any, stream: Any) -> int:
        self.calls.append(("record", event.value, stream.value))
        return self.code

    def cuStreamWaitEvent(self, stream: Any, event: Any, flags: int) -> int:
        self.calls.append(("wait", stream.value, event.value))
        return 0

    def cuLaunchHostFunc(self, stream: Any, function: Any, data: Any) -> int:
        self.calls.append(("host", stream.value))
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function.value)(data)
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> StandInDriver:
    driver = StandInDriver()
    monkeypatch.setattr(signals, "_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=COMPUTE))
    return driver


def test_the_compute_records_an_event_and_our_own_stream_does_the_rest(driver):
    ring = Ring()
    marks = signals.PostedSignals("cuda:0", ring)
    # Non-blocking, so that it never waits for the default stream, and of the highest priority.
    assert driver.calls == [("create", 1, -5)]
    driver.calls.clear()
    marks.mark()
    assert driver.calls == [("record", EVENT, COMPUTE), ("wait", OURS, EVENT), ("host", OURS)]
    waiter = threading.Thread(target=RingReader(ring.fd).wait, daemon=True)
    waiter.start()
    waiter.join(60)
    assert not waiter.is_alive()


def test_nothing_is_put_into_a_graph_capture(driver):
    marks = signals.PostedSignals("cuda:0", Ring())
    driver.calls.clear()
    driver.capturing = 1
    with pytest.raises(FillError, match="CUDA graph"):
        marks.mark()
    assert driver.calls == []


def test_what_the_driver_refuses_is_named(driver):
    marks = signals.PostedSignals("cuda:0", Ring())
    driver.code = 700
    with pytest.raises(FillError, match="cuEventRecord failed with code 700"):
        marks.mark()


def test_without_a_driver_it_says_so(monkeypatch):
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(signals.ctypes, "CDLL", missing)
    with pytest.raises(FillError, match=r"driver cannot be loaded: libcuda.so.1: cannot open"):
        signals._driver()


class Way:
    """A kind of mark whose cost is known, or that the driver refuses."""

    def __init__(self, name: str, cost_us: float | None) -> None:
        self.__name__, self.cost_us = name, cost_us

    def __call__(self, device: str, ring: Ring) -> Any:
        if self.cost_us is None:
            raise FillError(f"{self.__name__} failed with code 801")
        return SimpleNamespace(way=self, ring=ring)


@pytest.mark.parametrize(
    ("written_us", "posted_us", "expected"), [(2.0, 30.0, 0), (30.0, 2.0, 1), (None, 30.0, 1), (2.0, None, 0)]
)
def test_the_marks_that_cost_least_are_chosen(monkeypatch, written_us, posted_us, expected):
    monkeypatch.setattr(signals, "stream_cost_us", lambda device, marks: marks.way.cost_us)
    ways, ring = [Way("written", written_us), Way("posted", posted_us)], Ring()
    chosen: Any = signals.cuda_signals("cuda:0", ring, ways)
    assert (chosen.way, chosen.ring) == (ways[expected], ring)  # and what was tried went into another ring


def test_without_any_kind_of_mark_it_says_why():
    with pytest.raises(FillError, match="posted failed with code 801"):
        signals.cuda_signals("cuda:0", Ring(), [Way("written", None), Way("posted", None)])

"""Free waits through a stand-in for libcuda in C: the real calls, with threads for streams."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.fill.errors import FillError
from megatron.fill.pages.ready import ReadyPage
from megatron.fill.rank import freewaits, signals
from megatron.fill.rank.freewaits import CudaStreams, FreeWaits
from tests.support.waiting import until
from tests.unit.rank.test_stream_driver import library

__all__ = ["library"]
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler (cc)")


class Rank:
    """A rank's driver and its current stream, of which torch is made to speak."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.driver: Any = ctypes.CDLL(str(path))
        self.driver.stand_in_stream.restype = ctypes.c_void_p
        self.compute = self.current = self.driver.stand_in_stream()
        self.joined: list[int] = []
        self._calls: list[Any] = []
        real = ctypes.CDLL
        monkeypatch.setattr(signals.ctypes, "CDLL", lambda name: real(str(path) if name == "libcuda.so.1" else name))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: self.synchronize())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=self.current))
        monkeypatch.setattr(torch.cuda, "ExternalStream", self.external)
        monkeypatch.setattr(torch.cuda, "stream", self.entered)

    def external(self, stream: int, device: str) -> Any:
        def wait_stream(other: Any) -> None:
            self.joined.append(other.cuda_stream)
            event = ctypes.c_void_p()
            self.driver.cuEventCreate(ctypes.byref(event), 2)
            self.driver.cuEventRecord(event, ctypes.c_void_p(other.cuda_stream))
            self.driver.cuStreamWaitEvent(ctypes.c_void_p(stream), event, 0)

        return SimpleNamespace(cuda_stream=stream, wait_stream=wait_stream)

    @contextlib.contextmanager
    def entered(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.cuda_stream
        yield
        self.current = before

    def when_reached(self) -> threading.Event:
        """Set when the current stream gets here."""
        reached = threading.Event()
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: reached.set())
        self._calls.append(call)  # kept alive
        self.driver.stand_in_host(ctypes.c_void_p(self.current), call, None)
        return reached

    def synchronize(self) -> None:
        assert self.when_reached().wait(20)


@pytest.fixture
def rank(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rank:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    own = tmp_path / "libcuda.so.1"  # a copy is loaded anew, with nothing enqueued
    shutil.copy(library, own)
    return Rank(own, monkeypatch)


@pytest.fixture
def pages() -> list[ReadyPage]:
    """This rank's, and those of two others."""
    found = [ReadyPage.create(3) for _ in range(3)]
    for page in found:
        page.forget()
    return found


def waits_of(pages: list[ReadyPage]) -> FreeWaits:
    own, *others = pages
    return FreeWaits(CudaStreams("cuda:0", own, others), own, dict(enumerate(others, 1)), 0)


def test_a_receive_is_held_up_until_its_sender_has_got_to_its_send(rank: Rank, pages: list[ReadyPage]) -> None:
    waits = waits_of(pages)
    with waits.receive(1):
        received = rank.when_reached()  # where the receive would be posted
    assert rank.when_reached().wait(20)  # the stream that computes is not held up
    assert not received.wait(0.1)
    pages[0].words[1] = 1
    assert received.wait(20)
    assert rank.joined == [rank.compute]


def test_an_announcement_comes_when_the_stream_gets_there(rank: Rank, pages: list[ReadyPage]) -> None:
    waits = waits_of(pages)
    rank.driver.stand_in_compute(ctypes.c_void_p(rank.compute), ctypes.c_long(100_000))
    waits.announce(1)
    assert pages[1].words[0] == 0
    until(lambda: pages[1].words[0] == 1)


def test_receives_of_two_neighbours_do_not_wait_for_each_other(rank: Rank, pages: list[ReadyPage]) -> None:
    waits = waits_of(pages)
    reached = []
    for sender in (1, 2):
        with waits.receive(sender):
            reached.append(rank.when_reached())
    pages[0].words[2] = 1
    assert reached[1].wait(20)
    time.sleep(0.01)
    assert not reached[0].is_set()
    waits.release()
    assert reached[0].wait(20)


def test_a_receive_from_a_rank_that_has_vanished_ends_by_the_guard_and_so_does_the_guard(
    rank: Rank, pages: list[ReadyPage], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(freewaits, "HELD_S", 0.05)
    monkeypatch.setattr(freewaits, "_LOOK_S", 0.01)
    waits, ended = waits_of(pages), threading.Event()
    thread = threading.Thread(target=freewaits.guard, args=(waits, ended), daemon=True)
    thread.start()
    for _ in range(freewaits.MOST_RELEASES + 2):
        with waits.receive(1):
            received = rank.when_reached()
        assert received.wait(20)
    assert caplog.text.count("nothing has come from rank 1") == freewaits.MOST_RELEASES
    rank.synchronize()
    ended.set()
    thread.join(20)
    assert not thread.is_alive()


def test_a_driver_without_these_operations_is_refused(rank: Rank, pages: list[ReadyPage]) -> None:
    rank.driver.stand_in_fail(801)
    with pytest.raises(FillError, match=r"cu\w+ failed with code 801"):
        waits_of(pages)

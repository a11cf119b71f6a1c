"""Marks through a stand-in for libcuda in C: the real calls, with threads for streams."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.fill.errors import FillError
from megatron.fill.linux import semaphore
from megatron.fill.pages.ring import Fact, Ring, RingReader
from megatron.fill.rank import signals
from megatron.fill.rank.stream import StreamListener
from megatron.fill.types import BubbleKind

SOURCE = Path(__file__).parents[2] / "support" / "libcuda.c"
pytestmark = [
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler (cc)"),
    pytest.mark.usefixtures("own_pages"),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-pthread", "-Wall", "-Werror", "-o", path, SOURCE], check=True)
    return path


class Gpu:
    """The stand-in, a compute stream on it, and the signals of that stream."""

    def __init__(self, library: Path, way: Any) -> None:
        self.way = way
        self.driver: Any = ctypes.CDLL(str(library))
        self.driver.stand_in_stream.restype = ctypes.c_void_p
        self.driver.stand_in_calls.restype = ctypes.c_char_p
        self.compute = ctypes.c_void_p(self.driver.stand_in_stream())
        self.ring = Ring()
        self.reader = RingReader(self.ring.fd)

    def signals(self) -> Any:
        return self.way("cuda:0", self.ring)

    @property
    def one_mark(self) -> str:
        """The driver's calls for it."""
        return "cv" if self.way is signals.WrittenSignals else "crwh"

    def work(self, milliseconds: float = 0, gate: int = 0) -> None:
        """Enqueue compute; with a ``gate``, a semaphore's address, it goes on until that is posted."""
        if milliseconds:
            self.driver.stand_in_compute(self.compute, ctypes.c_long(int(1000 * milliseconds)))
        if gate:
            wait = ctypes.cast(ctypes.CDLL(None).sem_wait, ctypes.c_void_p)
            self.driver.stand_in_host(self.compute, wait, ctypes.c_void_p(gate))

    def calls(self) -> str:
        return self.driver.stand_in_calls().decode()


QUEUES = {"8": "a queue per stream", "1": "one queue for all"}


@pytest.fixture(
    params=[(queues, way) for queues in QUEUES for way in (signals.PostedSignals, signals.WrittenSignals)],
    ids=lambda param: f"{param[1].__name__}, {QUEUES[param[0]]}",
)
def gpu(request: pytest.FixtureRequest, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    queues, way = request.param
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    own = tmp_path / "libcuda.so.1"  # a copy is loaded anew, with nothing enqueued
    shutil.copy(library, own)
    gpu = Gpu(own, way)
    real = ctypes.CDLL
    monkeypatch.setattr(signals.ctypes, "CDLL", lambda name: real(str(own) if name == "libcuda.so.1" else name))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=gpu.compute.value))
    return gpu


class Gate:
    """What compute waits for: a semaphore of its own."""

    def __init__(self) -> None:
        self._memory = ctypes.create_string_buffer(semaphore.SEMAPHORE_BYTES)
        self.address = ctypes.addressof(self._memory)
        semaphore.create(self.address)

    def open(self) -> None:
        semaphore.post(self.address)


def heard(reader: RingReader) -> threading.Thread:
    """A thread that ends with the next post."""
    thread = threading.Thread(target=reader.wait, daemon=True)
    thread.start()
    return thread


def test_a_mark_is_told_when_the_compute_before_it_is_done(gpu: Gpu) -> None:
    marks, gate = gpu.signals(), Gate()
    gpu.work(gate=gate.address)
    marks.mark()  # the caller does not wait: the compute cannot end before this thread goes on
    assert gpu.calls() == gpu.one_mark
    thread = heard(gpu.reader)
    thread.join(0.1)
    assert thread.is_alive()
    gate.open()
    thread.join(20)
    assert not thread.is_alive()


def test_posts_come_in_the_order_of_the_marks(gpu: Gpu) -> None:
    listener = StreamListener(gpu.ring, gpu.signals())
    gates = [Gate() for _ in range(4)]
    facts = []
    for index, gate in enumerate(gates):
        gpu.work(gate=gate.address)
        listener.bubble_opened(BubbleKind.INTERIOR, index, 0)
    for index, gate in enumerate(gates):
        thread = heard(gpu.reader)
        thread.join(0.02)
        assert thread.is_alive(), f"mark {index} was posted before its compute was done"
        gate.open()
        thread.join(20)
        facts += gpu.reader.take()
    assert [(fact.fact, fact.index) for fact in facts] == [(Fact.BUBBLE_OPENED, index) for index in range(4)]


def test_the_training_s_own_margin_is_looked_after_between_iterations_every_now_and_then(gpu: Gpu) -> None:
    asked: list[str] = []

    def missing_bytes() -> int:
        asked.append(gpu.calls())
        return 100 + len(asked)

    listener = StreamListener(gpu.ring, gpu.signals(), missing_bytes)
    told: list[int] = []
    for number in range(1, 26):
        listener.iteration_started(number, 0)
        listener.bubble_opened(BubbleKind.INTERIOR, 0, 0)
        if number == 24:
            listener.disturbed("an evaluation")
        for _ in range(2):
            gpu.reader.wait()
            told += [fact.amount for fact in gpu.reader.take() if fact.fact is Fact.ITERATION_STARTED]
    assert told == [0] * 2 + [101] * 20 + [102] * 2 + [103]  # once it is known how much the training uses
    assert len(asked) == 3


def test_a_mark_needs_no_python(gpu: Gpu) -> None:
    marks = gpu.signals()
    gpu.work(milliseconds=20)
    marks.mark()
    value = ctypes.c_int()
    holding = ctypes.PyDLL(None)  # calls through it keep the interpreter lock
    for _ in range(100):
        holding.usleep(100_000)
        holding.sem_getvalue(ctypes.c_void_p(gpu.ring.semaphore), ctypes.byref(value))
        if value.value or ctypes.c_uint64.from_address(gpu.ring.reached).value:
            break
    reached = ctypes.c_uint64.from_address(gpu.ring.reached).value
    assert (value.value, reached) == ((0, 1) if gpu.ring.written else (1, 0))


def test_a_rank_that_switches_off_wakes_its_relay(gpu: Gpu) -> None:
    gpu.signals()
    thread = heard(gpu.reader)
    gpu.ring.switch_off()
    thread.join(20)
    assert not thread.is_alive()


def test_the_driver_s_errors_are_named_and_enqueue_nothing_more(gpu: Gpu) -> None:
    marks = gpu.signals()
    gpu.calls()
    gpu.driver.stand_in_fail(700)
    with pytest.raises(FillError, match="cuStreamIsCapturing failed with code 700"):
        marks.mark()
    assert gpu.calls() == "c"
    with pytest.raises(FillError, match=r"(cuCtxGetStreamPriorityRange|cuMemHostRegister_v2) failed with code"):
        gpu.way("cuda:0", Ring())


def test_nothing_is_put_into_a_capture(gpu: Gpu) -> None:
    marks = gpu.signals()
    gpu.calls()
    gpu.driver.stand_in_capture(gpu.compute, 1)
    with pytest.raises(FillError, match="CUDA graph"):
        marks.mark()
    assert gpu.calls() == "c"


def test_the_library_is_found_by_the_name_that_the_driver_has(library: Path) -> None:
    code = "from megatron.fill.rank import signals; print(signals._driver().cuLaunchHostFunc is not None)"
    environment = os.environ | {"LD_LIBRARY_PATH": str(library.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "True\n", done.stderr


def test_a_ring_with_marks_stays_mapped(gpu):
    """The driver refuses to register what is mapped where a registered page was unmapped."""
    gpu.signals()
    page = gpu.ring.header[0]
    gpu.ring = gpu.reader = None
    others = [Ring() for _ in range(3)]
    assert page not in {other.header[0] for other in others}

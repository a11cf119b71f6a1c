"""What a process of the measurement can be told to do."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.fill.hooks import BubbleBus
from megatron.fill.pages.gate import SharedGate, SharedGateReader
from megatron.fill.pages.ring import Ring
from megatron.fill.rank.relay import RelayProcess, RelaySpec
from megatron.fill.rank.rule import FillRule
from megatron.fill.rank.spec import RankSpec
from megatron.fill.rank.stream import StreamListener
from megatron.fill.records.rank import read_rank
from megatron.fill.sandbox.landlock import enter_rules
from megatron.fill.sandbox.powers import forgo_privileges
from megatron.fill.types import CycleKey, RankInfo
from scripts.benchmarks.micro.accelerator import Accelerator

WARMUP = 3  # iterations that the predictor sees before it opens the gate
_COMPUTE_S, _BUBBLE_S = 3e-3, 6e-3
_MARKS = 200  # few enough for all to be enqueued behind one kernel that spins
_INFO = RankInfo(0, 2, 0, 2, 0, 1, 0, 2, device="cuda:0")


class Actions:
    """The methods are called by ``serve``; each returns an object of JSON.

    Args:
        open_accelerator: called once, by the first that needs the device.
    """

    def __init__(self, open_accelerator: Callable[[], Accelerator]) -> None:
        self._open = open_accelerator
        self._accelerator: Accelerator | None = None
        self._gate: SharedGate | None = None

    @property
    def device(self) -> Accelerator:
        if self._accelerator is None:
            self._accelerator = self._open()
        return self._accelerator

    def touch(self) -> dict[str, Any]:
        """Have a context on the device, and nothing else; what is known of it."""
        return self.device.context()

    def ready(self) -> dict[str, Any]:
        """Be ready for everything else."""
        self.device.warm()
        return {}

    def gemm(self, seconds: float) -> dict[str, Any]:
        """Matrix products one after the other: how many in a second, and how long each took in ms."""
        taken: list[float] = []
        start_s = time.monotonic()
        while time.monotonic() < start_s + seconds:
            taken.append(self._taken_ns(self.device.gemm) / 1e6)
        return {"per_s": len(taken) / (time.monotonic() - start_s), "ms": taken}

    def spin(self, seconds: float) -> dict[str, Any]:
        """One block spins all the time."""
        return {"seconds": self._taken_ns(lambda: self.device.spin(seconds)) / 1e9}

    def wait(self, how: str, seconds: float) -> dict[str, Any]:
        """The stream waits for so long: in a kernel (``spin``), for a ``value``, or for an ``event``."""
        if how == "spin":
            return self.spin(seconds)
        wait, release = self.device.gate(how == "event")
        ender = threading.Timer(seconds, release)
        ender.start()
        try:
            return {"seconds": self._taken_ns(wait) / 1e9}
        finally:
            ender.join()

    def tiny(self, seconds: float, every_s: float) -> dict[str, Any]:
        """A smallest kernel every now and then: how long until it was done, in us."""
        taken: list[float] = []
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            taken.append(self._taken_ns(self.device.tiny) / 1e3)
            time.sleep(every_s)
        return {"us": taken}

    def costs(self, written: bool) -> dict[str, Any]:
        """What a mark costs: the host, in us each; the stream, in us on average."""
        ring = Ring()  # it has to live as long as its marks
        device, signals = self.device, self.device.signals(ring, written)
        host: list[float] = []

        def stream_ns(mark: bool) -> int:
            device.synchronize()
            device.set_clock()
            device.spin(0.05)  # so that all are enqueued before the first of them runs
            begun = device.note()
            for _ in range(_MARKS):
                device.tiny()
                if mark:
                    before_ns = time.monotonic_ns()
                    signals.mark()
                    host.append((time.monotonic_ns() - before_ns) / 1e3)
            ended = device.note()
            device.synchronize()
            return ended() - begun()

        stream_ns(True)
        host.clear()
        costs = sorted(stream_ns(True) - stream_ns(False) for _ in range(5))
        return {"host_us": host, "stream_us": costs[2] / _MARKS / 1e3}

    def open_gate(self) -> dict[str, Any]:
        """A gate for ``bubbles``, and how another process finds it."""
        self._gate = SharedGate()
        return {"pid": os.getpid(), "fd": self._gate.fd}

    def bubbles(self, count: int, written: bool = False) -> dict[str, Any]:
        """Iterations of compute and one bubble, told by marks to a relay that opens the gate.

        Returns:
            By the host's clock, in ns: when the device was at each mark (``opened``), and when the relay had heard of
            it (``heard``).
        """
        assert self._gate is not None
        device, gate = self.device, self._gate
        ring, bus = Ring(), BubbleBus()
        with tempfile.TemporaryDirectory() as folder:
            record = Path(folder) / "rank0.json"
            rule = FillRule(warmup=WARMUP, margin=0.0, min_bubble_ns=0)
            spec = RelaySpec(RankSpec(_INFO, str(record), rule), os.getpid(), ring.fd, gate.fd)
            signals = device.signals(ring, written)
            relay = RelayProcess(spec, ring, gate, Path(folder) / "relay.log")
            try:
                if not relay.wait_ready():
                    raise RuntimeError((Path(folder) / "relay.log").read_text(encoding="utf-8") or "no relay")
                listener = StreamListener(ring, signals, lambda: 0, relay.alive, relay.shut)
                bus.listener = listener
                opened = [self._iteration(bus, iteration) for iteration in range(1, count + WARMUP + 1)]
                listener.end()
                if not relay.finish():
                    said = (Path(folder) / "relay.log").read_text(encoding="utf-8").strip()
                    print(said)  # into this process's log
                    raise RuntimeError(f"the relay died: {said.splitlines()[-1] if said else 'it said nothing'}")
            finally:
                relay.kill()
            bubbles = read_rank(record).bubbles
        clock_error_ns = getattr(device, "clock_error_ns", 0)
        return {"opened": opened, "heard": [one.start_ns for one in bubbles], "clock_error_us": clock_error_ns / 1e3}

    def _iteration(self, bus: BubbleBus, number: int) -> int:
        """One of ``bubbles``; when its bubble opened on the device."""
        device = self.device
        device.synchronize()
        device.set_clock()
        bus.begin_iteration(number)
        bus.begin_schedule(CycleKey("1f1b", 1))
        device.spin(_COMPUTE_S)
        bus.forward(time.monotonic_ns())
        opened = device.note()
        bus.open(for_backward=True)
        device.spin(_BUBBLE_S)  # for the stream, a receive is time that passes
        bus.close()
        bus.end_iteration()
        device.synchronize()
        return opened()

    def attend(self, pid: int, fd: int) -> dict[str, Any]:
        """Launch a smallest kernel whenever the gate opens, until it is ended; when each was done, in ns."""
        page = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        gate = SharedGateReader(page)
        os.close(page)
        done: list[int] = []
        seq = 0
        while not gate.ended:
            bubble = gate.wait(seq)
            if bubble is not None:
                seq = bubble.seq
                self.device.tiny()
                self.device.synchronize()
                done.append(time.monotonic_ns())
        return {"done": done}

    def confine(self, folder: str) -> dict[str, Any]:
        """Enter Landlock's rules as a job does, for good.

        Of ``/proc``, which is closed to jobs, the driver writes the names of its threads; a job's init opens these for
        it.  Here it is open: the whole of a sandbox is what ``pipefill try`` has.
        """
        lacking = [forgo_privileges(), enter_rules([folder, "/tmp", "/dev", "/proc"], network=False)]
        return {"lacking": [reason for reason in lacking if reason]}

    def cap(self, memory_bytes: int) -> dict[str, Any]:
        self.device.cap(memory_bytes)
        return {}

    def allocate(self, memory_bytes: int) -> dict[str, Any]:
        return {"had": self.device.allocate(memory_bytes)}

    def _taken_ns(self, launch: Callable[[], None]) -> int:
        start_ns = time.monotonic_ns()
        launch()
        self.device.synchronize()
        return time.monotonic_ns() - start_ns

"""The relay: a small process beside a rank whose GPU runs behind its Python.

It sleeps until the GPU gets to a mark, takes the facts that come with it, and passes them with that time to the very
listener that a rank on the CPU runs itself: predictor, gate, board and records are the same code.  The rank only
writes facts and never waits for the relay.

    python -m megatron.fill.rank.relay SPEC
"""

from __future__ import annotations

import gc
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron.fill.device.nvml import shared_nvml
from megatron.fill.device.port import DeviceError
from megatron.fill.linux import host
from megatron.fill.pages.board import CycleBoard
from megatron.fill.pages.control import ControlReader
from megatron.fill.pages.gate import GateWriter, SharedGate
from megatron.fill.pages.lastword import MOST_BYTES, LastWord
from megatron.fill.pages.ring import Entry, Fact, Ring, RingReader
from megatron.fill.rank.listener import RankListener
from megatron.fill.rank.spec import RankSpec
from megatron.fill.spec import Spec
from megatron.fill.types import BubbleKind, CycleKey

logger = logging.getLogger("pipefill.relay")

_START_S = 20.0


@dataclass(frozen=True, slots=True)
class RelaySpec(Spec):
    """What a rank tells its relay.

    Attributes:
        rank: how it is listened to.
        parent: the rank's pid.
        gate_fd, board_fd, control_fd: None to measure only.
        left_fd: of the page on which it leaves what it cannot write; None for nowhere.
        device_uuid: the GPU's own name; None where its memory does not matter.
    """

    rank: RankSpec
    parent: int
    ring_fd: int
    gate_fd: int | None = None
    board_fd: int | None = None
    control_fd: int | None = None
    device_uuid: str | None = None
    left_fd: int | None = None

    @property
    def fds(self) -> list[int]:
        """The descriptors that the relay is given."""
        fds = (self.ring_fd, self.gate_fd, self.board_fd, self.control_fd, self.left_fd)
        return [fd for fd in fds if fd is not None]


class RelayProcess:
    """The rank's handle on its relay.

    Args:
        gate: what the relay writes while it lives; ended for it when it dies, and the rank's again after ``finish``.
        log: the relay's errors are added to this file.
    """

    def __init__(self, spec: RelaySpec, ring: Ring, gate: SharedGate | None, log: Path) -> None:
        self._ring = ring
        self._gate = gate
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megatron.fill.rank.relay", spec.to_json()],
                stdin=subprocess.DEVNULL,
                stderr=output,  # what the brake has to say goes where the training's own output goes
                pass_fds=spec.fds,
            )

    def wait_ready(self, timeout_s: float = _START_S) -> bool:
        """Wait until it listens, so that the first facts get their times as well; False if it does not."""
        until = time.monotonic() + timeout_s
        while not self._ring.heard and self.alive() and time.monotonic() < until:
            time.sleep(0.002)
        return self._ring.heard

    def alive(self) -> bool:
        return self._process.poll() is None

    def shut(self) -> None:
        """Filling is over before the training is: the relay ends the gate and writes the record.  Does not wait."""
        self._ring.switch_off()
        if not self.alive():
            self._end_gate()

    def finish(self, timeout_s: float = 20.0) -> bool:
        """Wait until it has ended, after ``StreamListener.end`` or ``shut``; kill it when ``timeout_s`` are over.

        Returns:
            Whether all of the record is written.  If not, the gate is ended.
        """
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            logger.warning("the relay did not catch up within %g s; it is killed", timeout_s)
            self._process.kill()
            self._process.wait()
        if self._process.returncode:
            self._end_gate()
        return self._process.returncode == 0

    def kill(self) -> None:
        """The main job failed: end it and the gate now."""
        self._process.kill()
        self._process.wait()
        self._end_gate()

    def _end_gate(self) -> None:
        if self._gate is not None:
            self._gate.end()


class FreeMemory:
    """The device memory that the training leaves free, as the driver said lately; 0 while it says nothing.

    The driver is asked on a thread of the relay's: its answer may take milliseconds, while a worker makes a context.

    Args:
        ask: the driver.

    Attributes:
        missing_bytes: what of the training's own margin cannot be reserved, and is no worker's to have.
    """

    def __init__(self, ask: Callable[[], int]) -> None:
        self.missing_bytes = 0
        self._ask = ask
        self._bytes = 0
        self._failed = False

    def __call__(self) -> int:
        return max(0, self._bytes - self.missing_bytes)

    def look(self) -> None:
        """Ask once."""
        try:
            self._bytes = self._ask()
        except DeviceError as error:
            self._bytes = 0
            if not self._failed:
                logger.warning("how much memory is free cannot be said, so nothing is filled: %s", error)
            self._failed = True

    def watch(self, every_s: float = 0.1) -> None:
        """Ask again and again, for as long as this process lives."""

        def run() -> None:
            while True:
                self.look()
                time.sleep(every_s)

        self.look()
        threading.Thread(target=run, name="memory", daemon=True).start()


class Relay:
    """Passes facts on at the times at which the device got to them.

    Args:
        free: what the listener asks for the free memory.
        gate: what the listener writes; shut here only when facts were lost.
    """

    def __init__(self, ring: RingReader, listener: RankListener, free: FreeMemory, gate: GateWriter | None) -> None:
        self.ring = ring
        self.listener = listener
        self.free = free
        self.gate = gate
        self.ended = False
        self._lost = 0
        self._skipping = False
        self._last_ns = 0

    def run(self) -> None:
        """Relay until the training is over or the rank has switched off."""
        self.ring.listen()
        while not self.ended:
            self.ring.wait()
            now_ns = time.monotonic_ns()
            if self.ring.off:
                return
            self.step(now_ns)

    def step(self, now_ns: int) -> None:
        """The device is at the next mark."""
        entries = self.ring.take()
        if self.ring.lost != self._lost:
            self._lose(now_ns)
        for entry in entries:
            self._skipping = self._skipping and entry.fact not in (Fact.ITERATION_STARTED, Fact.END)
            if not self._skipping:
                self._tell(entry, now_ns)
        self._last_ns = now_ns

    def _lose(self, now_ns: int) -> None:
        """Facts were overwritten: leave the rest of this iteration alone, and do not learn from the next one."""
        self._lost = self.ring.lost
        self._skipping = True
        if self.gate is not None:
            self.gate.close(now_ns)
        self.listener.disturbed("facts were lost")

    def _tell(self, entry: Entry, now_ns: int) -> None:
        listener = self.listener
        match entry.fact:
            case Fact.BUBBLE_OPENED:
                promised = entry.free_bytes if entry.free_bytes >= 0 else None
                listener.bubble_opened(BubbleKind(entry.text), entry.index, now_ns, promised)
            case Fact.BUBBLE_CLOSED:
                listener.bubble_closed(now_ns)
            case Fact.COMPUTED:
                listener.computed(entry.text, self._last_ns, now_ns)
            case Fact.ITERATION_STARTED:
                self.free.missing_bytes = entry.free_bytes
                listener.iteration_started(entry.number, now_ns, watched=not entry.index)
            case Fact.ITERATION_ENDED:
                listener.iteration_ended(now_ns)
            case Fact.CYCLE_STARTED:
                key = CycleKey(entry.text, entry.index, abs(entry.number), entry.number < 0)
                listener.cycle_started(key, now_ns)
            case Fact.CYCLE_ENDED:
                listener.cycle_ended()
            case Fact.DISTURBED:
                listener.disturbed(entry.text)
            case Fact.END:
                self.ended = True


def serve(spec: RelaySpec) -> None:
    """Relay for the rank of ``spec`` until its training is over, and write its record.

    Raises:
        OSError: not all of the record could be written.
    """
    ring = RingReader(spec.ring_fd)
    gate = None if spec.gate_fd is None else SharedGate(spec.gate_fd)
    board = None if spec.board_fd is None else CycleBoard(spec.board_fd)
    control = None if spec.control_fd is None else ControlReader(spec.control_fd)
    free = FreeMemory(_driver(spec.device_uuid))
    listener = spec.rank.listener(free, gate, board, control)
    relay = Relay(ring, listener, free, gate)
    free.watch()
    try:
        relay.run()
    finally:
        if gate is not None and not relay.ended:
            gate.end()
        written = listener.finish()
        if ring.lost:
            logger.warning("%d facts were lost: the relay was too slow", ring.lost)
    if not written:
        if spec.left_fd is not None:
            LastWord(spec.left_fd).leave(listener.recorder.unwritten(MOST_BYTES))
        raise OSError(f"{spec.rank.record} could not be written in full")


def _driver(uuid: str | None) -> Callable[[], int]:
    """Who says how much memory is free; nobody does of a device that is not named."""
    if uuid is None:
        return lambda: 0
    return lambda: shared_nvml().free_bytes(uuid)


def main() -> None:
    spec = RelaySpec.from_json(sys.argv[1])
    host.die_with_parent(spec.parent)
    logging.basicConfig(format=f"%(asctime)s relay {spec.rank.info.rank}: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rank decides when it is over
    host.ignore_notices()
    gc.disable()  # nothing here makes cycles, and a collection would hold a signal up for milliseconds
    serve(spec)


if __name__ == "__main__":
    main()

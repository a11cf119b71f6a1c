"""The relay: a small process next to a rank on CUDA, where the host runs ahead of the GPU.

It sleeps until the GPU reaches a mark, takes the facts written before it, and passes them with that time to the same
listener that a rank on the CPU runs itself, with the same predictor, gate, board and records.  The rank only writes
facts and never waits for the relay.

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
from megatron.fill.pages.gate import SharedGate
from megatron.fill.pages.lastword import MOST_BYTES, LastWord
from megatron.fill.pages.ring import Entry, Fact, Ring, RingReader
from megatron.fill.rank.listener import RankListener
from megatron.fill.rank.spec import RankSpec
from megatron.fill.spec import Spec
from megatron.fill.types import BubbleKind, CycleKey

logger = logging.getLogger("pipefill.relay")

_START_S = 20.0  # longest wait for the relay's start
_ASK_S = 0.1  # time between two looks at the free memory


@dataclass(frozen=True, slots=True)
class RelaySpec(Spec):
    """The settings of a relay, from its rank, with the descriptors of the rank's pages; None to measure only."""

    rank: RankSpec
    parent: int  # the rank's pid
    ring_fd: int
    gate_fd: int | None = None
    board_fd: int | None = None
    control_fd: int | None = None
    device_uuid: str | None = None  # None if the GPU's free memory is not needed
    left_fd: int | None = None  # for records that cannot be written (``LastWord``)

    @property
    def fds(self) -> list[int]:
        fds = (self.ring_fd, self.gate_fd, self.board_fd, self.control_fd, self.left_fd)
        return [fd for fd in fds if fd is not None]


class RelayProcess:
    """The rank's handle on its relay, whose standard error is appended to ``log``.

    The gate is written by the relay while it lives; it is ended here if it dies, and written by the rank after
    ``finish``.
    """

    def __init__(self, spec: RelaySpec, ring: Ring, gate: SharedGate | None, log: Path) -> None:
        self._ring = ring
        self._gate = gate
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megatron.fill.rank.relay", spec.to_json()],
                stdin=subprocess.DEVNULL,
                stderr=output,  # not stdout: the brake's messages go to the training's own output
                pass_fds=spec.fds,
            )

    def wait_ready(self) -> bool:
        """Wait until the relay listens, so that it times the first facts, too; False if it does not in time."""
        until = time.monotonic() + _START_S
        while not self._ring.heard and self.alive() and time.monotonic() < until:
            time.sleep(0.002)
        return self._ring.heard

    def alive(self) -> bool:
        return self._process.poll() is None

    def shut(self) -> None:
        """Switch filling off without waiting; the relay then ends the gate and writes the record."""
        self._ring.switch_off()
        if not self.alive():
            self._end_gate()

    def finish(self, timeout_s: float = 20.0) -> bool:
        """Wait for the relay's end, after ``StreamListener.end`` or ``shut``, and kill it after ``timeout_s``.

        Returns:
            True if all of the record was written.  Otherwise the gate is ended.
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
        """Kill the relay and end the gate, after the training has failed."""
        self._process.kill()
        self._process.wait()
        self._end_gate()

    def _end_gate(self) -> None:
        if self._gate is not None:
            self._gate.end()


@dataclass(eq=False, repr=False)
class FreeMemory:
    """The device memory that the training leaves free, by the driver's latest answer to a thread; 0 without one."""

    ask: Callable[[], int]  # returns it in bytes, which may take milliseconds while a worker creates a context

    def __post_init__(self) -> None:
        self.missing_bytes = 0  # part of the training's own margin that it could not reserve, and workers must not use
        self._bytes = 0
        self._failed = False

    def __call__(self) -> int:
        return max(0, self._bytes - self.missing_bytes)

    def look(self) -> None:
        try:
            self._bytes = self.ask()
        except DeviceError as error:
            self._bytes = 0
            if not self._failed:
                logger.warning("how much memory is free cannot be said, so nothing is filled: %s", error)
            self._failed = True

    def watch(self) -> None:
        """Ask the driver now, and then every ``_ASK_S`` in a daemon thread."""

        def run() -> None:
            while True:
                self.look()
                time.sleep(_ASK_S)

        self.look()
        threading.Thread(target=run, name="memory", daemon=True).start()


@dataclass(eq=False, repr=False)
class Relay:
    """Passes facts to the listener, whose free memory is ``free``, at the times at which the device reaches them."""

    ring: RingReader
    listener: RankListener
    free: FreeMemory

    def __post_init__(self) -> None:
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
        """Process the facts up to the mark that the device has reached."""
        entries = self.ring.take()
        if self.ring.lost != self._lost:
            self._lose(now_ns)
        for entry in entries:
            self._skipping = self._skipping and entry.fact not in (Fact.ITERATION_STARTED, Fact.END)
            if not self._skipping:
                self._tell(entry, now_ns)
        self._last_ns = now_ns

    def _lose(self, now_ns: int) -> None:
        """Handle overwritten facts: skip the rest of this iteration, and do not learn from the next one."""
        self._lost = self.ring.lost
        self._skipping = True
        if self.listener.gate is not None:
            self.listener.gate.close(now_ns)
        self.listener.disturbed("facts were lost")

    def _tell(self, entry: Entry, now_ns: int) -> None:
        listener = self.listener
        match entry.fact:
            case Fact.BUBBLE_OPENED:
                promised = entry.amount if entry.amount >= 0 else None
                listener.bubble_opened(BubbleKind(entry.text), entry.index, now_ns, promised)
            case Fact.BUBBLE_CLOSED:
                listener.bubble_closed(now_ns)
            case Fact.COMPUTED:
                listener.computed(entry.text, self._last_ns, now_ns)
            case Fact.ITERATION_STARTED:
                self.free.missing_bytes = entry.amount
                listener.iteration_started(entry.number, now_ns, watched=not entry.index)
            case Fact.ITERATION_ENDED:
                listener.iteration_ended(now_ns)
            case Fact.CYCLE_STARTED:
                key = CycleKey(entry.text, entry.index, abs(entry.number), entry.number < 0, entry.amount)
                listener.cycle_started(key, now_ns)
            case Fact.DISTURBED:
                listener.disturbed(entry.text)
            case Fact.END:
                self.ended = True


def serve(spec: RelaySpec) -> None:
    """Relay for a rank until its training is over, and write its record; OSError if not all could be written."""
    ring = RingReader(spec.ring_fd)
    gate = None if spec.gate_fd is None else SharedGate(spec.gate_fd)
    board = None if spec.board_fd is None else CycleBoard(spec.board_fd)
    control = None if spec.control_fd is None else ControlReader(spec.control_fd)
    free = FreeMemory(_driver(spec.device_uuid))
    listener = spec.rank.listener(free, gate, board, control)
    relay = Relay(ring, listener, free)
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
    """Return the function that reads the GPU's free memory; without a UUID, one that returns 0."""
    if uuid is None:
        return lambda: 0
    return lambda: shared_nvml().free_bytes(uuid)


def main() -> None:
    spec = RelaySpec.from_json(sys.argv[1])
    host.die_with_parent(spec.parent)
    logging.basicConfig(format=f"%(asctime)s relay {spec.rank.info.rank}: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rank decides on the end
    host.ignore_notices()
    gc.disable()  # this code makes no reference cycles, and a collection would delay a signal by milliseconds
    serve(spec)


if __name__ == "__main__":
    main()

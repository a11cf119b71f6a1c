"""A stand-in for a GPU that two processes share: a file that is locked is a device that is busy.

python -m tests.support.micro_standin FILE      an actor of scripts/benchmarks/gpu_micro.py that uses it
"""

from __future__ import annotations

import fcntl
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.fill.device.port import MIB
from megatron.fill.pages.ring import Ring
from megatron.fill.rank.signals import Signals
from scripts.benchmarks.micro.actions import Actions
from scripts.benchmarks.micro.actor import serve
from tests.support.fake_stream import ThreadStream

GEMM_S = 5e-3


class StandIn:
    """One process's stream (an Accelerator)."""

    def __init__(self, busy: Path) -> None:
        self._busy = busy.open("ab")
        # Drivers from 570 on name their threads so, and fail where they may not.
        Path(f"/proc/{os.getpid()}/task/{threading.get_native_id()}/comm").write_text("stand-in", encoding="ascii")
        limit = os.environ.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "").removeprefix("0=").removesuffix("M")
        self._cap_bytes = int(limit) * MIB if limit else sys.maxsize
        self._thread = ThreadStream(0)

    def warm(self) -> None:
        """It always takes as long."""

    def tiny(self) -> None:
        self._launch(lambda: self._alone(0.0))

    def gemm(self) -> None:
        self._launch(lambda: self._alone(GEMM_S))

    def spin(self, seconds: float) -> None:
        self._thread.compute(1e3 * seconds)

    def synchronize(self) -> None:
        done: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._launch(lambda: done.put(None))
        done.get()

    def signals(self, ring: Ring, written: bool = False) -> Signals:
        ring.written = written
        self._thread._address, self._thread.reached = ring.semaphore, ring.reached if written else 0
        return self._thread

    def gate(self, behind_event: bool) -> tuple[Callable[[], None], Callable[[], None]]:
        opened = threading.Event()
        return lambda: self._launch(opened.wait), opened.set

    def set_clock(self) -> None:
        """Both are the host's."""

    def note(self) -> Callable[[], int]:
        noted: list[int] = []
        self._launch(lambda: noted.append(time.monotonic_ns()))
        return lambda: noted[0]

    def context(self) -> dict[str, Any]:
        return {"mem_get_info_us": [1.0, 2.0, 3.0]}

    def cap(self, memory_bytes: int) -> None:
        self._cap_bytes = memory_bytes

    def allocate(self, memory_bytes: int) -> bool:
        return memory_bytes <= self._cap_bytes

    def _launch(self, work: Callable[[], Any]) -> None:
        self._thread._work.put(work)

    def _alone(self, seconds: float) -> None:
        fcntl.flock(self._busy, fcntl.LOCK_EX)
        time.sleep(seconds)
        fcntl.flock(self._busy, fcntl.LOCK_UN)


if __name__ == "__main__":
    serve(Actions(lambda: StandIn(Path(sys.argv[1]))))

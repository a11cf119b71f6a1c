"""What the runtime sees of a device: the limits of a worker, and who holds the worker to them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from megatron.fill.errors import FillError

MIB = 2**20


class DeviceError(FillError):
    """A device cannot be used as asked."""


class Sharing(StrEnum):
    """How the main job and the workers share a GPU."""

    TIMESLICE = "timeslice"
    MPS = "mps"


@dataclass(frozen=True, slots=True)
class Limits:
    """What one worker may use.

    Attributes:
        memory_bytes: device memory, of all processes of the worker together; on the CPU what they hold privately or
            share with each other, on CUDA what they allocate (a context needs ``WorkerDevice.overhead_bytes`` more).
            None for no cap.
        processes: processes and threads.
        files: open files of each process.
        sm_percentage: the share of a GPU's multiprocessors, 1 to 100.

    Raises:
        DeviceError: a limit that nothing could keep.
    """

    memory_bytes: int | None = None
    processes: int = 256
    files: int = 1024
    sm_percentage: int = 100

    def __post_init__(self) -> None:
        if self.memory_bytes is not None and self.memory_bytes <= 0:
            raise DeviceError(f"a memory cap of {self.memory_bytes} bytes: expected more than 0, or none")
        if self.processes < 1 or self.files < 1:
            raise DeviceError(f"{self.processes} processes, {self.files} files: expected at least 1 of each")
        if not 1 <= self.sm_percentage <= 100:
            raise DeviceError(f"{self.sm_percentage}% of the multiprocessors: expected 1 to 100")


class Limiter(Protocol):
    """The agent's hold on one worker.

    Attributes:
        environment: to be added to the worker's environment before it is started.
    """

    environment: dict[str, str]

    def adopt(self, pid: int, holder: int | None = None) -> None:
        """The worker was just started.

        Args:
            pid: its first process; the worker's others are below it.
            holder: the process that holds it, if that is not the caller; it is under no limit.
        """

    def look(self) -> str:
        """Called a few times a second: why the worker must end; empty while all is well.

        It may leave the worker stopped: who calls it decides next whether the worker is to run (``Enforcer.check``).
        """

    def explain(self) -> str:
        """After a death by SIGKILL: the kernel's reason, if it was out of memory; else empty."""

    def busy_s(self) -> float:
        """The CPU time that the worker's processes have had in all, those that have ended included."""

    def held_bytes(self) -> int:
        """The device memory that the worker's processes hold, as of the latest ``look``."""

    @property
    def peak_bytes(self) -> int:
        """The most that it was seen to hold."""

    def kill(self) -> None:
        """End every process of the worker that can be found, within a second.  It does not reap the worker itself."""

    def close(self) -> None:
        """Give back what the limiter itself holds; the worker is gone."""


class WorkerDevice(Protocol):
    """One rank's device, as its agent sees it.

    Attributes:
        name: as the rank knows it: ``cpu`` or ``cuda:3``.
        worker_name: as its workers know it; they see one GPU only, which is ``cuda:0`` to them.
        overhead_bytes: what a worker takes of the device beyond what it allocates.
        nodes: the files of ``/dev`` that a worker needs to use it.
    """

    name: str
    worker_name: str
    overhead_bytes: int
    nodes: tuple[str, ...]

    def free_bytes(self) -> int:
        """Memory of the device that is free, for everyone."""

    def limiter(self, limits: Limits, name: str) -> Limiter:
        """A limiter for one worker that is about to be started.

        Args:
            name: unique among the living workers of this machine; letters, digits, ``.``, ``_`` and ``-``.
        """


def mib(value: int) -> str:
    return f"{value / MIB:.0f} MiB"

"""The runtime's interface to a device: the limits of a worker, and their enforcement."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from megatron.fill.errors import FillError

MIB = 2**20


class DeviceError(FillError):
    """A device cannot be used as asked."""


class Sharing(StrEnum):
    """The sharing of a GPU between the training and the workers."""

    TIMESLICE = "timeslice"
    MPS = "mps"


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a worker."""

    # Device memory of all its processes together; on the CPU, memory that they hold privately or share with each other;
    # on CUDA, memory that they allocate (each context takes ``WorkerDevice.overhead_bytes`` more).  None for no cap.
    memory_bytes: int | None = None
    processes: int = 256  # processes and threads
    files: int = 1024  # open files of each process
    sm_percentage: int = 100  # share of a GPU's multiprocessors, at least 1


class Limiter(Protocol):
    """The enforcement of one worker's limits, by its agent."""

    environment: dict[str, str]  # variables to add to the worker's environment before it is started
    held_bytes: int  # device memory that the worker's processes hold, as of the latest ``look``
    peak_bytes: int  # the greatest of any ``look``

    def adopt(self, pid: int, holder: int | None = None) -> None:
        """Take over a worker that was just started, by its first process, from which all others descend.

        ``holder`` is its parent that set up the sandbox, if it is not the caller; it has no limits.
        """

    def look(self) -> str:
        """Check the limits, a few times a second; return the reason why the worker must end, empty if there is none.

        The call may leave the worker stopped: the caller then decides whether it runs again (``Enforcer.check``).
        """

    def explain(self) -> str:
        """The kernel's reason for a death by SIGKILL if it was out of memory, else empty."""

    def busy_s(self) -> float:
        """The CPU time in s of all processes of the worker, including those that have ended."""

    def kill(self) -> None:
        """Kill all processes of the worker that can be found, within a second.  The worker itself is not reaped."""

    def close(self) -> None:
        """Release the limiter's own resources; the worker has ended."""


class WorkerDevice(Protocol):
    """A rank's device, as its agent sees it."""

    name: str  # name by which the rank knows it: ``cpu`` or ``cuda:3``
    worker_name: str  # name by which workers know it; they see a single GPU, ``cuda:0``
    overhead_bytes: int  # device memory that a worker takes in addition to its allocations
    nodes: tuple[str, ...]  # files in ``/dev`` that a worker needs to use it

    def free_bytes(self) -> int: ...

    def energy_j(self) -> float | None:
        """The energy in J that the device has used since some time in the past; None if it has no counter."""

    def limiter(self, limits: Limits, name: str) -> Limiter:
        """Create the limiter of a worker that is about to be started.

        ``name`` is unique among the living workers of this machine; letters, digits, ``.``, ``_`` and ``-``.
        """

"""The GPU of the measurements, the ways to share it, and the processes that use it."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from megatron.fill.device.cuda import OVERHEAD_BYTES
from megatron.fill.device.mps import MpsDaemon
from megatron.fill.device.nvml import Nvml
from megatron.fill.device.port import MIB, DeviceError, Limits
from scripts.benchmarks.micro.actor import Actor

TIMESLICE, MPS = "timeslice", "mps"
CAP_BYTES = 1024 * MIB  # of a worker under MPS
_COMMAND = (sys.executable, "-m", "scripts.benchmarks.gpu_micro", "--actor")


class Stage:
    """Starts processes on one GPU; made by ``opened``.

    Args:
        command: of a process that calls ``serve``.

    Attributes:
        daemon: of MPS; None where it cannot be had.
        no_mps: why not.
    """

    def __init__(self, folder: Path, uuid: str, nvml: Nvml | None, command: Sequence[str]) -> None:
        self.folder = folder
        self.uuid = uuid
        self.nvml = nvml
        self.daemon: MpsDaemon | None = None
        self.no_mps = "not asked for"
        self._command = command

    @property
    def ways(self) -> list[str]:
        return [TIMESLICE] if self.daemon is None else [TIMESLICE, MPS]

    def free_bytes(self) -> int:
        return 0 if self.nvml is None else self.nvml.free_bytes(self.uuid)

    def lists(self, pid: int) -> bool:
        """Whether the driver names this process as one that uses the GPU."""
        return self.nvml is not None and pid in self.nvml.used_bytes(self.uuid)

    @contextmanager
    def actors(self, way: str, *roles: str, connections: int = 8) -> Iterator[list[Actor]]:
        """Processes with these roles: ``main`` as a rank, ``side`` as a worker, of the environment at least.

        They have not used the device yet.
        """
        with ExitStack() as stack:
            started = []
            for role in roles:
                environment = {"CUDA_DEVICE_MAX_CONNECTIONS": str(connections)} | self._environment(way, role)
                log = self.folder / f"{way}-{role}.log"
                started.append(Actor(f"{role} ({way})", self._command, environment, log))
                stack.callback(started[-1].end)
            yield started

    def _environment(self, way: str, role: str) -> dict[str, str]:
        if way == TIMESLICE or self.daemon is None:
            none = self.folder / "no-mps"  # a daemon of somebody else's is not to be used
            none.mkdir(exist_ok=True)
            return {"CUDA_MPS_PIPE_DIRECTORY": str(none)}
        if role == "main":
            return self.daemon.main_environment([self.uuid])
        return self.daemon.environment(Limits(memory_bytes=CAP_BYTES), self.uuid, OVERHEAD_BYTES)


@contextmanager
def opened(
    nvml: Nvml | None, uuid: str, command: Sequence[str] = _COMMAND, keep: Path | None = None
) -> Iterator[Stage]:
    """A stage with an MPS daemon of its own, if there can be one.

    Args:
        keep: folder for the logs of its processes and of the daemon; None for one that is removed at the end.
    """
    with tempfile.TemporaryDirectory(prefix="micro") as scratch, ExitStack() as stack:
        folder = (keep or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        stage = Stage(folder, uuid, nvml, command)
        try:
            stage.daemon = MpsDaemon.start(folder, [uuid], os.getpid())
            stack.callback(stage.daemon.stop)
            stage.no_mps = ""
        except DeviceError as error:
            stage.no_mps = str(error)
        yield stage

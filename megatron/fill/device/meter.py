"""How long a piece of work takes by itself, and the most memory it needs."""

from __future__ import annotations

import os
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Protocol

from megatron.fill.device.port import DeviceError
from megatron.fill.linux.peak import PeakMemory


class Meter(Protocol):
    """Measures one piece of work at a time."""

    def forget(self) -> None:
        """What earlier work has left in an allocator's cache is no need of the work that follows."""

    def start(self) -> None:
        """The work begins."""

    def stop(self) -> tuple[int, int]:
        """It has ended: its nanoseconds, and the peak of all that this process held meanwhile, in bytes."""


class HostMeter:
    """On the CPU: the time that this process had the core, between the main job's turns; its peak resident memory."""

    def __init__(self) -> None:
        self._memory = PeakMemory()
        self._start_ns = 0

    def forget(self) -> None:
        """Nothing to do: what was given back is resident no more."""

    def start(self) -> None:
        self._memory.reset()
        self._start_ns = time.process_time_ns()

    def stop(self) -> tuple[int, int]:
        duration_ns = time.process_time_ns() - self._start_ns
        return duration_ns, self._memory.read_bytes()


class CudaMeter:
    """On CUDA: from an idle device to an idle device; the peak of PyTorch's allocator."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._start_ns = 0

    def forget(self) -> None:
        import torch

        torch.cuda.empty_cache()

    def start(self) -> None:
        import torch

        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._start_ns = time.monotonic_ns()

    def stop(self) -> tuple[int, int]:
        import torch

        torch.cuda.synchronize(self._device)
        return time.monotonic_ns() - self._start_ns, torch.cuda.max_memory_reserved(self._device)


def meter(device: str) -> Meter:
    return CudaMeter(device) if device.startswith("cuda") else HostMeter()


def resident_bytes() -> int:
    """The memory that this process holds now."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fingerprint(device: str) -> str:
    """What a measured time depends on besides the job: the device's model, and the versions of what runs on it.

    Two devices with the same fingerprint share their profiles.

    Raises:
        DeviceError: PipeFill is used from a checkout that is not installed.
    """
    versions = f"torch {version('torch')}, pipefill {own_version()}"
    if not device.startswith("cuda"):
        return f"{_processor()}, {versions}"
    import torch

    return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}, {versions}"


def own_version() -> str:
    """Of PipeFill, as it is installed for this Python.

    Raises:
        DeviceError: it is not, as where a checkout is used as it is.
    """
    try:
        return version("pipefill")
    except PackageNotFoundError as error:
        raise DeviceError(
            f"PipeFill is not installed for {sys.executable}, so jobs and their profiles would have no version of it; "
            "expected an install of this checkout, or of a wheel made of it (pip wheel --no-deps .)"
        ) from error


def default_device() -> str:
    """Where a job is measured if nobody says: on the first GPU, where there is one."""
    return "cuda:0" if Path("/dev/nvidia0").exists() else "cpu"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith(("model name", "CPU implementer", "cpu model")):
            return line.partition(":")[2].strip()
    return os.uname().machine

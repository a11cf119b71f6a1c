"""Meters for the time and the peak memory of a piece of work."""

from __future__ import annotations

import os
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from megatron.fill.device.port import DeviceError
from megatron.fill.linux.host import free_host_bytes
from megatron.fill.linux.peak import PeakMemory


class HostMeter:
    """A meter on the CPU: the CPU time of this process, and its peak resident memory."""

    def __init__(self) -> None:
        self._memory = PeakMemory()
        self._start_ns = 0

    def forget(self) -> None:
        """Do nothing: freed memory is not resident any more."""

    def start(self) -> None:
        self._memory.reset()
        self._start_ns = time.process_time_ns()

    def stop(self) -> tuple[int, int]:
        """Return the time in ns, and the peak of all memory of this process in bytes, since ``start``."""
        duration_ns = time.process_time_ns() - self._start_ns
        return duration_ns, self._memory.read_bytes()


class CudaMeter:
    """A meter on CUDA: the time from an idle device to an idle device, and the peak of PyTorch's reserved memory."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._start_ns = 0

    def forget(self) -> None:
        """Empty the allocator's cache, so that memory of earlier work does not count for the work that follows."""
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


type Meter = HostMeter | CudaMeter  # of one piece of work at a time


def meter(device: str) -> Meter:
    return CudaMeter(device) if device.startswith("cuda") else HostMeter()


def resident_bytes() -> int:
    """The resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def free_bytes(device: str) -> int:
    """The free memory of a device in bytes, in a process that may use it."""
    if device == "cpu":
        return free_host_bytes()
    import torch

    return int(torch.cuda.mem_get_info(device)[0])


def fingerprint(device: str) -> str:
    """A text with all that a measured time depends on besides the job: the device's model, and software versions.

    Devices with the same fingerprint share their profiles.  DeviceError as ``own_version``.
    """
    versions = f"torch {version('torch')}, pipefill {own_version()}"
    if not device.startswith("cuda"):
        return f"{_processor()}, {versions}"
    import torch

    return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}, {versions}"


def own_version() -> str:
    """The version of PipeFill that is installed for this Python; DeviceError for a checkout without an install."""
    try:
        return version("pipefill")
    except PackageNotFoundError as error:
        raise DeviceError(
            f"PipeFill is not installed for {sys.executable}, so jobs and their profiles would have no version of it; "
            "expected an install of this checkout, or of a wheel made of it (pip wheel --no-deps .)"
        ) from error


def default_device() -> str:
    """The device on which a job is measured by default: the first GPU, or the CPU if there is none."""
    return "cuda:0" if Path("/dev/nvidia0").exists() else "cpu"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith(("model name", "CPU implementer", "cpu model")):
            return line.partition(":")[2].strip()
    return os.uname().machine

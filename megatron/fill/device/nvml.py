"""The driver's information about GPUs, through NVML, which needs no CUDA context, so an agent can use it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from megatron.fill.device.port import DeviceError

_COMPUTE_MODES = {1: "one", 2: "nobody", 3: "one"}  # NVML_COMPUTEMODE_*: exclusive thread, prohibited, ... process


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, or a MIG slice."""

    index: int
    uuid: str
    name: str


class Nvml:
    """A thin, typed wrapper of the ``pynvml`` module, or of a stand-in for it; DeviceError if there is no driver."""

    def __init__(self, library: Any = None) -> None:
        self._library = library = library or import_module("pynvml")
        try:
            library.nvmlInit()
        except library.NVMLError as error:
            raise DeviceError(f"NVML cannot be used: {error}") from error

    def driver(self) -> str:
        return str(self._library.nvmlSystemGetDriverVersion())

    def gpus(self) -> list[Gpu]:
        """All GPUs that this process may use, in the order of their PCI bus."""
        library = self._library
        found = []
        for index in range(library.nvmlDeviceGetCount()):
            handle = library.nvmlDeviceGetHandleByIndex(index)
            found.append(Gpu(index, library.nvmlDeviceGetUUID(handle), library.nvmlDeviceGetName(handle)))
        return found

    def shared_by(self, uuid: str) -> str:
        """The processes that may use a GPU at a time, by its compute mode: ``all``, ``one`` or ``nobody``."""
        try:
            mode = self._library.nvmlDeviceGetComputeMode(self._handle(uuid))
        except (self._library.NVMLError, AttributeError):  # a MIG slice has no compute mode
            return "all"
        return _COMPUTE_MODES.get(int(mode), "all")

    def free_bytes(self, uuid: str) -> int:
        return int(self._library.nvmlDeviceGetMemoryInfo(self._handle(uuid)).free)

    def total_bytes(self, uuid: str) -> int:
        return int(self._library.nvmlDeviceGetMemoryInfo(self._handle(uuid)).total)

    def energy_j(self, uuid: str) -> float | None:
        """The energy in J that a GPU has used since its driver was loaded; None without the counter, which came with
        Volta, and which MIG slices do not have."""
        try:
            return float(self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle(uuid))) / 1000
        except (self._library.NVMLError, AttributeError):
            return None

    def used_bytes(self, uuid: str) -> dict[int, int]:
        """The memory of each process on a GPU by pid, contexts included.

        The pids are the host's: in a container with its own pid namespace they are not the ones that we know.
        """
        library, handle = self._library, self._handle(uuid)
        used: dict[int, int] = {}
        # Clients of MPS are in a separate list.
        for ask in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetMPSComputeRunningProcesses"):
            with contextlib.suppress(library.NVMLError, AttributeError):
                for process in getattr(library, ask)(handle):
                    used[process.pid] = max(used.get(process.pid, 0), process.usedGpuMemory or 0)
        return used

    def _handle(self, uuid: str) -> Any:
        try:
            return self._library.nvmlDeviceGetHandleByUUID(uuid)
        except self._library.NVMLError as error:
            raise DeviceError(f"GPU {uuid}: {error}") from error


shared_nvml = cache(Nvml)  # that of this process


def uuid_of(name: str, visible: str | None, gpus: list[Gpu]) -> str:
    """The UUID of the device that CUDA calls ``cuda:N``; DeviceError if there is none.

    Args:
        visible: ``CUDA_VISIBLE_DEVICES``, whose entries are indices or beginnings of UUIDs; None if it is not set.
        gpus: GPUs in the order of their PCI bus.
    """
    number = name.removeprefix("cuda").removeprefix(":") or "0"
    if not name.startswith("cuda") or not number.isdigit():
        raise DeviceError(f"device {name!r}: expected cpu or cuda:0")
    entries = [str(gpu.index) for gpu in gpus] if visible is None else [entry.strip() for entry in visible.split(",")]
    if int(number) >= len(entries):
        raise DeviceError(f"{name}: {len(entries)} visible devices")
    entry = entries[int(number)]
    if entry.startswith("MIG-"):
        return entry
    for gpu in gpus:
        if entry == str(gpu.index) or (entry.startswith("GPU-") and gpu.uuid.startswith(entry)):
            return gpu.uuid
    raise DeviceError(f"{name}: CUDA_VISIBLE_DEVICES names {entry!r}, and there is no such GPU")

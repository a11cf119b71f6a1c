"""A CUDA GPU as a worker's device, and the limits that the worker sets in its own process.

Three mechanisms limit a worker's memory: PyTorch's allocator fails allocations beyond the cap; an MPS server, if there
is one, fails those of the driver; and a watch over the memory that the driver reports for its processes ends a worker
that got around both.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megatron.fill.device.cpu import HostLimiter
from megatron.fill.device.joining import ASK_NVML
from megatron.fill.device.mps import PIPE, MpsDaemon
from megatron.fill.device.nvml import Nvml, shared_nvml, uuid_of
from megatron.fill.device.port import MIB, Limits, Sharing
from megatron.fill.display import mib
from megatron.fill.linux.cgroup import CgroupHome, find_home
from megatron.fill.linux.proc import has_host_pids

logger = logging.getLogger("pipefill.agent")

# Memory of a process besides its allocations: the context, its modules and cuBLAS workspaces.
OVERHEAD_BYTES = 1024 * MIB
_TERMINATE_S = 0.8  # part of the second that ``kill`` may take, in which three programs have to start and answer
_FRACTION_SINCE = (2, 15)  # first PyTorch whose allocator accepts per_process_memory_fraction in its configuration
_SM_GRAIN = 8  # granularity of green contexts in multiprocessors, on compute capability 9 and later
_NO_DAEMON = "/nonexistent"  # a pipe folder without a daemon
_keep: list[Any] = []  # green contexts, which are destroyed with their last reference


def cap_memory(device: str, memory_bytes: int | None) -> None:
    """Make this process's CUDA allocations beyond ``memory_bytes`` fail, through PyTorch's caching allocator."""
    if memory_bytes is None:
        return
    import torch

    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, memory_bytes / total), device)


@dataclass
class Entrance:
    """A callable that sets the worker's limits in its own process as soon as the task has imported PyTorch.

    A task may import PyTorch as late as in ``create`` or ``init``, so this is called before and after ``init``; once
    the limits are set, further calls do nothing.
    """

    device: str  # as the worker knows it
    limits: Limits
    sharing: Sharing
    _calls: int = field(default=0, init=False)
    _done: bool = field(default=False, init=False)

    def __call__(self) -> None:
        self._calls += 1
        if "torch" in sys.modules and not self._done:
            self._done = True
            if lacking := enter(self.device, self.limits, self.sharing):
                logger.info(lacking)
        elif self._calls == 2 and not self._done:
            logger.info(
                "the task has not imported PyTorch, so neither its memory cap nor its share of the GPU is set there"
            )


def enter(device: str, limits: Limits, sharing: Sharing) -> str:
    """Set the limits of PyTorch in this process on a GPU; return a message if its share cannot be set, else ''.

    This initializes CUDA, and changes the current stream of this thread only.
    """
    cap_memory(device, limits.memory_bytes)
    if sharing is Sharing.MPS or limits.sm_percentage == 100:
        return ""
    reason = _share_multiprocessors(device, limits.sm_percentage)
    return f"all multiprocessors can be used: {reason}" if reason else ""


def _share_multiprocessors(device: str, percentage: int) -> str:
    """Run this thread's kernels on a share of the GPU, in a green context; return the reason if that fails, or ''."""
    import torch

    try:
        from torch.cuda.green_contexts import GreenContext
    except ImportError:
        return f"PyTorch {torch.__version__} has no green contexts"
    if not hasattr(GreenContext, "Stream"):
        # Before 2.12 a green context could only be made current in this thread.  Autograd's own thread would run
        # backward passes on another default stream, outside of the share and not ordered with this thread's kernels.
        return f"PyTorch {torch.__version__} has no streams of green contexts, which came with 2.12"
    index = torch.device(device).index or 0
    count = torch.cuda.get_device_properties(index).multi_processor_count
    try:
        context = GreenContext.create(num_sms=share_of(count, percentage), device_id=index)
        torch.cuda.set_stream(context.Stream())
    except RuntimeError as error:
        return str(error).splitlines()[0]
    _keep.append(context)
    return ""


def share_of(count: int, percentage: int) -> int:
    """The number of multiprocessors for a share of ``count``: rounded down to the granularity, but at least that."""
    return max(_SM_GRAIN, count * percentage // 100 // _SM_GRAIN * _SM_GRAIN)


def synchronize(device: str) -> None:
    """Wait until all kernels of this process have ended: only then is a step over, since launches are asynchronous."""
    torch = sys.modules.get("torch")
    if device.startswith("cuda") and torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize(device)


@dataclass(eq=False)
class CudaLimiter:
    """The enforcement of a worker's limits on a GPU, and, by a ``HostLimiter``, on processes."""

    limits: Limits
    name: str
    home: CgroupHome
    uuid: str
    nvml: Nvml
    mps: MpsDaemon | None  # daemon that the rank uses; None for time-slicing
    # Pid of a process that uses this GPU, if the driver's pids may be those of another pid namespace: the driver's list
    # is then used only while it contains this pid.
    witness: int | None

    def __post_init__(self) -> None:
        limits, mps, uuid = self.limits, self.mps, self.uuid
        self.held_bytes = self.peak_bytes = 0
        # With the NVML check, a task whose import asks PyTorch for CUDA can still fork afterwards.
        environment = {"CUDA_VISIBLE_DEVICES": uuid, ASK_NVML: "1"}
        # Without MPS, the worker must not become a client of a daemon that happens to run on this machine: it would
        # share faults with all other clients of that daemon, and have no limits.
        environment |= {PIPE: _NO_DAEMON} if mps is None else mps.environment(limits, uuid, OVERHEAD_BYTES)
        if limits.memory_bytes is not None:
            total = self.nvml.total_bytes(uuid)
            environment |= allocator_environment(limits.memory_bytes, total, os.environ, version("torch"))
        # Created last, so that an error above leaves no control group behind.
        self._host = HostLimiter(limits, self.name, self.home, cap_host_memory=False)
        self.environment = self._host.environment | environment

    def adopt(self, pid: int, holder: int | None = None) -> None:
        self._host.adopt(pid, holder)

    def look(self) -> str:
        reason = self._host.look()
        used = self.nvml.used_bytes(self.uuid)
        if self.witness is not None and self.witness not in used:
            used = {}  # these pids are of another namespace: one may equal a pid of the job and mean another process
        holders = [process.pid for process in self._host.alive if process.pid in used]
        self.held_bytes = sum(used[pid] for pid in holders)
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        cap = self.limits.memory_bytes
        # The context of each process does not count as memory of the job.
        if reason or cap is None or self.held_bytes <= cap + OVERHEAD_BYTES * len(holders):
            return reason
        return (
            f"over its cap of {mib(cap)} of device memory: {mib(self.held_bytes)} held by {len(holders)} processes, "
            f"contexts included, with a peak of {mib(self.peak_bytes)}"
        )

    def explain(self) -> str:
        return self._host.explain()

    def busy_s(self) -> float:
        return self._host.busy_s()

    def kill(self) -> None:
        if self.mps is not None:
            left = self.mps.terminate([process.pid for process in self._host.processes()], _TERMINATE_S)
            if left:
                logger.warning(
                    "processes %s are killed though the MPS server has not said that they are off the GPU: work of "
                    "theirs that goes on there can end other clients",
                    left,
                )
        self._host.kill()
        self.held_bytes = 0

    def close(self) -> None:
        self._host.close()


def allocator_environment(memory_bytes: int, total_bytes: int, environment: Any, torch: str) -> dict[str, str]:
    """The environment that caps PyTorch's allocator in the worker and the processes that it starts; empty if this
    PyTorch cannot be capped this way."""
    if tuple(int(part) for part in torch.split(".")[:2]) < _FRACTION_SINCE:
        return {}
    inherited = environment.get("PYTORCH_ALLOC_CONF") or environment.get("PYTORCH_CUDA_ALLOC_CONF")
    fraction = f"per_process_memory_fraction:{min(1.0, memory_bytes / total_bytes):.6f}"
    return {"PYTORCH_ALLOC_CONF": ",".join(filter(None, [inherited, fraction]))}


def device_nodes(uuid: str, proc: Path = Path("/proc"), dev: Path = Path("/dev")) -> tuple[str, ...]:
    """The files in ``/dev`` of this GPU; those of all GPUs if the driver does not report which are its own."""
    shared = [dev / name for name in ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset", "nvidia-caps")]
    for found in (proc / "driver/nvidia/gpus").glob("*/information"):
        facts = dict(line.split(":", 1) for line in found.read_text(encoding="utf-8").splitlines() if ":" in line)
        if facts.get("GPU UUID", "").strip() == uuid:
            return tuple(map(str, [dev / f"nvidia{facts['Device Minor'].strip()}", *shared]))
    return tuple(map(str, [*sorted(dev.glob("nvidia[0-9]*")), *shared]))


class CudaDevice:
    """A GPU; DeviceError if there is no driver, or no such GPU.

    Args:
        mps: daemon that the rank uses; None for time-slicing.
        uuid: UUID of the GPU; None to find it by ``CUDA_VISIBLE_DEVICES``, if CUDA numbers GPUs by their PCI bus.
        rank: pid of the training's process on the device; None for this process.
    """

    def __init__(
        self,
        name: str,
        mps: MpsDaemon | None = None,
        uuid: str | None = None,
        nvml: Nvml | None = None,
        home: CgroupHome | None = None,
        rank: int | None = None,
    ) -> None:
        self.name = name
        self._witness = None if has_host_pids() else rank or os.getpid()
        self.worker_name = "cuda:0"
        self.overhead_bytes = OVERHEAD_BYTES
        self._nvml = nvml or shared_nvml()
        self._home = find_home() if home is None else home
        self._mps = mps
        self.uuid = uuid or uuid_of(name, os.environ.get("CUDA_VISIBLE_DEVICES"), self._nvml.gpus())
        self.nodes = device_nodes(self.uuid)

    def free_bytes(self) -> int:
        return self._nvml.free_bytes(self.uuid)

    def energy_j(self) -> float | None:
        return self._nvml.energy_j(self.uuid)

    def limiter(self, limits: Limits, name: str) -> CudaLimiter:
        return CudaLimiter(limits, name, self._home, self.uuid, self._nvml, self._mps, self._witness)

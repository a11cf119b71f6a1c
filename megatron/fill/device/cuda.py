"""A CUDA GPU as a worker's device, and the worker's own side of it.

Three things hold a worker to its memory: PyTorch's allocator, which makes the allocation fail; the MPS server, where
one is used, which makes the driver's fail; and a watch over what the driver says its processes hold, which ends the
worker if it got around both.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megatron.fill.device.cpu import HostLimiter
from megatron.fill.device.mps import MpsDaemon
from megatron.fill.device.nvml import Nvml, shared_nvml, uuid_of
from megatron.fill.device.port import MIB, Limits, Sharing, mib
from megatron.fill.device.probes import has_host_pids
from megatron.fill.linux.cgroup import CgroupHome, find_home

logger = logging.getLogger("pipefill.agent")

# A context, its modules and cuBLAS workspaces: what a process takes before, and beyond, its first allocation.
OVERHEAD_BYTES = 1024 * MIB
_TERMINATE_S = 0.8  # of the second that ``kill`` may take; three processes have to start and answer meanwhile
_FRACTION_SINCE = (2, 15)  # PyTorch's allocator knows per_process_memory_fraction in its configuration
_SM_GRAIN = 8  # green contexts come in these, on compute capability 9 and later
_NO_DAEMON = "/nonexistent"  # a folder of pipes where no daemon answers
_keep: list[Any] = []  # green contexts, which end with their last reference


def cap_memory(device: str, memory_bytes: int | None) -> None:
    """Make this process's CUDA allocations beyond ``memory_bytes`` fail, through PyTorch's caching allocator."""
    if memory_bytes is None:
        return
    import torch

    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, memory_bytes / total), device)


class Entrance:
    """The worker's side of its limits on a GPU, entered as soon as the task has brought PyTorch.

    A task may import it as late as in ``create``, or in ``init``: so this is called before and after ``init``, and does
    nothing more once it is done.

    Args:
        say: called with each limit that cannot be kept, and why.
    """

    def __init__(self, device: str, limits: Limits, sharing: Sharing, say: Callable[[str], None]) -> None:
        self._device = device
        self._limits = limits
        self._sharing = sharing
        self._say = say
        self._calls = 0
        self._done = False

    def __call__(self) -> None:
        self._calls += 1
        if "torch" in sys.modules and not self._done:
            self._done = True
            for lacking in enter(self._device, self._limits, self._sharing):
                self._say(lacking)
        elif self._calls == 2 and not self._done:
            self._say(
                "the task has not imported PyTorch, so neither its memory cap nor its share of the GPU is set there"
            )


def enter(device: str, limits: Limits, sharing: Sharing) -> list[str]:
    """Hold PyTorch in this process to its limits on a GPU.

    It begins to use CUDA.  Every thread's current stream but this one's is left as it is.

    Returns:
        What could not be done, and why.
    """
    cap_memory(device, limits.memory_bytes)
    if sharing is Sharing.MPS or limits.sm_percentage == 100:
        return []
    reason = _share_multiprocessors(device, limits.sm_percentage)
    return [f"all multiprocessors can be used: {reason}"] if reason else []


def _share_multiprocessors(device: str, percentage: int) -> str:
    """Run this thread's kernels on a share of the GPU, in a green context; why not, if it cannot."""
    import torch

    try:
        from torch.cuda.green_contexts import GreenContext
    except ImportError:
        return f"PyTorch {torch.__version__} has no green contexts"
    if not hasattr(GreenContext, "Stream"):
        # Before 2.12 one could only be made current in this thread.  Autograd's own thread would run backward passes
        # on another default stream, beside the share and in no order with what this thread enqueues.
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
    """The multiprocessors of a share: no more than asked for, and at least the fewest that there can be."""
    return max(_SM_GRAIN, count * percentage // 100 // _SM_GRAIN * _SM_GRAIN)


def settle(device: str) -> None:
    """Return when all kernels of this process have ended: host time is not GPU time, and a step ends only then."""
    torch = sys.modules.get("torch")
    if device.startswith("cuda") and torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize(device)


class FreeDeviceMemory:
    """The device's free memory in bytes, as the driver says; read at most every quarter of a second."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._read_ns = 0
        self._bytes = 0

    def __call__(self) -> int:
        import torch

        now_ns = time.monotonic_ns()
        if now_ns - self._read_ns > 250_000_000:
            self._bytes = torch.cuda.mem_get_info(self._device)[0]
            self._read_ns = now_ns
        return self._bytes


class CudaLimiter:
    """Holds one worker to its limits on a GPU, and to those on processes.

    Args:
        uuid: of the GPU.
        witness: a process known to use this GPU, if the driver's pids may be those of another namespace: what the
            driver lists then counts only while this one is among it.
    """

    def __init__(
        self,
        limits: Limits,
        name: str,
        home: CgroupHome,
        uuid: str,
        nvml: Nvml,
        mps: MpsDaemon | None,
        witness: int | None = None,
    ) -> None:
        self.limits = limits
        self._uuid = uuid
        self._nvml = nvml
        self._mps = mps
        self._witness = witness
        self._held_bytes = 0
        self._peak_bytes = 0
        # A task of which a module asks PyTorch for CUDA while it is imported can still fork afterwards.
        environment = {"CUDA_VISIBLE_DEVICES": uuid, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        # Without MPS, a daemon that happens to run on this machine must not make the worker its client: it would share
        # its faults with all others of that daemon, and be under none of its limits.
        environment |= (
            {"CUDA_MPS_PIPE_DIRECTORY": _NO_DAEMON} if mps is None else mps.environment(limits, uuid, OVERHEAD_BYTES)
        )
        if limits.memory_bytes is not None:
            total = nvml.total_bytes(uuid)
            environment |= allocator_environment(limits.memory_bytes, total, os.environ, version("torch"))
        # Last of all: whatever is raised before leaves no control group behind.
        self._host = HostLimiter(limits, name, home, cap_host_memory=False)
        self.environment = self._host.environment | environment

    def adopt(self, pid: int, holder: int | None = None) -> None:
        self._host.adopt(pid, holder)

    def look(self) -> str:
        reason = self._host.look()
        used = self._nvml.used_bytes(self._uuid)
        if self._witness is not None and self._witness not in used:
            used = {}  # one of these numbers may be a process of the job's, and mean another
        holders = [process.pid for process in self._host.alive if process.pid in used]
        self._held_bytes = sum(used[pid] for pid in holders)
        self._peak_bytes = max(self._peak_bytes, self._held_bytes)
        cap = self.limits.memory_bytes
        # A context for each process is not what the job allocated.
        if reason or cap is None or self._held_bytes <= cap + OVERHEAD_BYTES * len(holders):
            return reason
        return (
            f"over its cap of {mib(cap)} of device memory: {mib(self._held_bytes)} held by {len(holders)} processes, "
            f"contexts included, with a peak of {mib(self._peak_bytes)}"
        )

    def explain(self) -> str:
        return self._host.explain()

    def busy_s(self) -> float:
        return self._host.busy_s()

    def held_bytes(self) -> int:
        return self._held_bytes

    @property
    def peak_bytes(self) -> int:
        return self._peak_bytes

    def kill(self) -> None:
        if self._mps is not None:
            left = self._mps.terminate([process.pid for process in self._host.processes()], _TERMINATE_S)
            if left:
                logger.warning(
                    "processes %s are killed though the MPS server has not said that they are off the GPU: work of "
                    "theirs that goes on there can end other clients",
                    left,
                )
        self._host.kill()
        self._held_bytes = 0

    def close(self) -> None:
        self._host.close()


def allocator_environment(memory_bytes: int, total_bytes: int, environment: Any, torch: str) -> dict[str, str]:
    """The cap for PyTorch's allocator, for whatever the worker starts too; empty if this PyTorch does not know it."""
    if tuple(int(part) for part in torch.split(".")[:2]) < _FRACTION_SINCE:
        return {}
    inherited = environment.get("PYTORCH_ALLOC_CONF") or environment.get("PYTORCH_CUDA_ALLOC_CONF")
    fraction = f"per_process_memory_fraction:{min(1.0, memory_bytes / total_bytes):.6f}"
    return {"PYTORCH_ALLOC_CONF": ",".join(filter(None, [inherited, fraction]))}


def device_nodes(uuid: str, proc: Path = Path("/proc"), dev: Path = Path("/dev")) -> tuple[str, ...]:
    """The files of ``/dev`` for this one GPU; those of all where the driver does not say whose is whose."""
    shared = [dev / name for name in ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset", "nvidia-caps")]
    for found in (proc / "driver/nvidia/gpus").glob("*/information"):
        facts = dict(line.split(":", 1) for line in found.read_text(encoding="utf-8").splitlines() if ":" in line)
        if facts.get("GPU UUID", "").strip() == uuid:
            return tuple(map(str, [dev / f"nvidia{facts['Device Minor'].strip()}", *shared]))
    return tuple(map(str, [*sorted(dev.glob("nvidia[0-9]*")), *shared]))


class CudaDevice:
    """One GPU.

    Args:
        name: as the rank knows it: ``cuda:3``.
        mps: the daemon that the rank uses; None for time-slicing.
        rank: the main job's process on it; None for this one.
        uuid: of the GPU; found by ``CUDA_VISIBLE_DEVICES`` if not given, which trusts that CUDA numbers the GPUs as
            their bus does.

    Raises:
        DeviceError: there is no driver, or no such GPU.
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

    def limiter(self, limits: Limits, name: str) -> CudaLimiter:
        return CudaLimiter(limits, name, self._home, self.uuid, self._nvml, self._mps, self._witness)

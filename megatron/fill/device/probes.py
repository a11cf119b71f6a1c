"""Probes of this machine's means to isolate workers, a small one per function."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from megatron.fill.device.mps import PROGRAM
from megatron.fill.device.nvml import shared_nvml
from megatron.fill.device.port import DeviceError
from megatron.fill.linux import memfd
from megatron.fill.linux.cgroup import CgroupHome, find_home
from megatron.fill.linux.host import unordered
from megatron.fill.linux.proc import has_host_pids, text


@dataclass(frozen=True, slots=True)
class Facts:
    """The results of the probes."""

    gpus: tuple[str, ...]  # names
    driver: str  # version of the driver, or the reason why there is none
    mps: str  # path of the MPS control program; empty for none
    host_pids: bool  # True if this process is in the pid namespace that the driver and the kernel's log use
    cgroup: CgroupHome
    cores: int
    idle_class: bool  # True if the idle scheduling class may be used
    autogroup: bool  # True if sessions compete for the cores as groups
    sealing: bool  # True if shared memory can be sealed
    kernel_log: bool  # True if it can be read
    device_regions: tuple[str, ...] = ()  # regions of device memory that the kernel's controller ``dmem`` knows
    device_limits: tuple[str, ...] = ()  # limits on this process in ``dmem.max``: ``region bytes``
    exclusive: tuple[str, ...] = ()  # the GPUs that only one process or none may use, by their compute mode
    cuda_lacks: str = ""  # reason why CUDA does not start in a job's sandbox; empty without a GPU
    unordered: str = ""  # reason why this processor's shared memory cannot be used without locks


def gather() -> Facts:
    """Probe this machine, for all facts except ``cuda_lacks``."""
    exclusive: tuple[str, ...] = ()
    try:
        nvml = shared_nvml()
        gpus, driver = nvml.gpus(), nvml.driver()
        modes = [(gpu.index, nvml.shared_by(gpu.uuid)) for gpu in gpus]
        exclusive = tuple(f"GPU {index} is for {whom} process" for index, whom in modes if whom != "all")
    except (DeviceError, ImportError) as error:
        gpus, driver = [], str(error)
    device_regions, device_limits = find_device_limits()
    return Facts(
        gpus=tuple(gpu.name for gpu in gpus),
        driver=driver,
        mps=shutil.which(PROGRAM) or "",
        host_pids=has_host_pids(),
        cgroup=find_home(),
        cores=len(os.sched_getaffinity(0)),
        idle_class=can_idle(),
        autogroup=has_autogroup(),
        sealing=can_seal(),
        unordered=unordered(),
        kernel_log=os.access("/dev/kmsg", os.R_OK),
        device_regions=device_regions,
        device_limits=device_limits,
        exclusive=exclusive,
    )


def find_device_limits(
    proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """``Facts.device_regions``, which drivers register, and ``device_limits`` (Linux, cgroup-v2.rst)."""
    lines = text(proc / "self/cgroup").splitlines()
    path = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "")
    own = groups / path.lstrip("/")
    known = text(groups / "dmem.capacity") + text(own / "dmem.current")
    regions = {line.split()[0] for line in known.splitlines()}
    limits = []
    for group in (own, *own.parents):
        if not group.is_relative_to(groups):
            break
        limits += [line for line in text(group / "dmem.max").splitlines() if not line.endswith(" max")]
    return tuple(sorted(regions)), tuple(limits)


def can_idle() -> bool:
    """True if a process may enter the idle scheduling class; tried in a child, which may be unable to leave it."""
    child = os.fork()
    if child == 0:
        try:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            os._exit(0)
        except OSError:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    return status == 0


def has_autogroup(proc: Path = Path("/proc")) -> bool:
    return text(proc / "sys/kernel/sched_autogroup_enabled").strip() == "1"


def can_seal() -> bool:
    try:
        os.close(memfd.create("probe", 1))
    except (OSError, AttributeError):
        return False
    return True

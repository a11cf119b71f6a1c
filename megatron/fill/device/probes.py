"""What this machine has for keeping workers in: one small question per function."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from megatron.fill.device.mps import PROGRAM
from megatron.fill.device.nvml import shared_nvml
from megatron.fill.device.port import DeviceError
from megatron.fill.linux.architecture import unordered
from megatron.fill.linux.cgroup import CgroupHome, find_home

_HOST_PIDS = "pid:[4026531836]"  # the first pid namespace has this number on every Linux


@dataclass(frozen=True, slots=True)
class Facts:
    """What was found.

    Attributes:
        gpus: their names; empty for none.
        driver: its version; where there is none, why not.
        mps: the MPS control program's path; empty for none.
        host_pids: this process has the pids that the driver and the kernel's log speak of.
        autogroup: sessions compete for the cores as groups.
        exclusive: the GPUs that only one process or none may use, by their compute mode.
        device_regions: of device memory, as the kernel's controller ``dmem`` knows them.
        unordered: why this processor's shared memory cannot be used without locks; empty where it can.
        cuda_lacks: why CUDA does not start behind a job's walls; empty where it does, or there is no GPU.
        device_limits: ``dmem.max`` of this process's control group, where somebody has set it: ``region bytes``.
    """

    gpus: tuple[str, ...]
    driver: str
    mps: str
    host_pids: bool
    cgroup: CgroupHome
    cores: int
    idle_class: bool
    autogroup: bool
    sealing: bool
    kernel_log: bool
    root: bool
    device_regions: tuple[str, ...] = ()
    device_limits: tuple[str, ...] = ()
    exclusive: tuple[str, ...] = ()
    cuda_lacks: str = ""
    unordered: str = ""


def gather() -> Facts:
    """Ask this machine."""
    gpus, driver = find_gpus()
    regions, limits = find_device_limits()
    return Facts(
        gpus=gpus,
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
        root=os.getuid() == 0,
        device_regions=regions,
        device_limits=limits,
        exclusive=find_exclusive(),
    )


def find_gpus() -> tuple[tuple[str, ...], str]:
    """The GPUs' names, and the driver's version or why there is none."""
    try:
        nvml = shared_nvml()
        return tuple(gpu.name for gpu in nvml.gpus()), nvml.driver()
    except (DeviceError, ImportError) as error:
        return (), str(error)


def find_exclusive() -> tuple[str, ...]:
    """The GPUs that only one process, or none, may use: which and whom."""
    try:
        nvml = shared_nvml()
        modes = [(gpu.index, nvml.shared_by(gpu.uuid)) for gpu in nvml.gpus()]
    except (DeviceError, ImportError):
        return ()
    return tuple(f"GPU {index} is for {whom} process" for index, whom in modes if whom != "all")


def find_device_limits(
    proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What the control groups know of device memory, and which limits hold this process (the kernel's cgroup-v2.rst).

    Drivers register their regions with the controller ``dmem``; where one does not, nothing is limited by it.
    """
    path = ""
    with contextlib.suppress(OSError, StopIteration):
        lines = (proc / "self/cgroup").read_text(encoding="utf-8").splitlines()
        path = next(line.removeprefix("0::") for line in lines if line.startswith("0::"))
    own = groups / path.lstrip("/")
    regions = {line.split()[0] for line in (*_lines(groups / "dmem.capacity"), *_lines(own / "dmem.current"))}
    limits = []
    for group in (own, *own.parents):
        if not group.is_relative_to(groups):
            break
        limits += [line for line in _lines(group / "dmem.max") if not line.endswith(" max")]
    return tuple(sorted(regions)), tuple(limits)


def _lines(file: Path) -> list[str]:
    try:
        return [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError:
        return []


def has_host_pids(proc: Path = Path("/proc")) -> bool:
    try:
        return os.readlink(proc / "self/ns/pid") == _HOST_PIDS
    except OSError:
        return False


def can_idle() -> bool:
    """Whether a process may enter the idle scheduling class; tried in a child, since it may not get out again."""
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
    try:
        return (proc / "sys/kernel/sched_autogroup_enabled").read_text(encoding="ascii").strip() == "1"
    except OSError:
        return False


def can_seal() -> bool:
    """Whether shared memory can be made that its readers cannot resize: the gate's."""
    try:
        fd = os.memfd_create("pipefill-probe", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    except (OSError, AttributeError):
        return False
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True

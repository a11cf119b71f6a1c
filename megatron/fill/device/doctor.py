"""A diagnosis of this machine: its means to isolate workers, the enforcement of each limit, faults that stay open."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from megatron.fill.device.port import DeviceError
from megatron.fill.device.probes import Facts
from megatron.fill.device.sharing import choose_sharing, mps_obstacle


class Has(StrEnum):
    YES = "yes"
    PARTLY = "partly"
    NO = "no"


@dataclass(frozen=True, slots=True)
class Ability:
    name: str
    has: Has
    detail: str


@dataclass(frozen=True, slots=True)
class Binding:
    """A limit, and the mechanism that enforces it."""

    limit: str
    uses: str
    instead: str = ""  # reason why no better mechanism is used; empty if there is none


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The content of ``pipefill doctor``."""

    abilities: list[Ability]
    bindings: list[Binding]
    notes: list[str]


def diagnose(facts: Facts) -> Diagnosis:
    return Diagnosis(_abilities(facts), list(_bindings(facts)), _notes(facts))


def _abilities(facts: Facts) -> list[Ability]:
    home = facts.cgroup
    cgroup = Has.NO if home.path is None else Has.YES if home.binds_memory and home.binds_processes else Has.PARTLY
    controllers = ", ".join(sorted(home.controllers)) or "no controllers"
    return [
        Ability("CUDA", _yes(bool(facts.gpus)), _counted(facts.gpus) or "no GPU"),
        Ability("NVML", _yes(bool(facts.gpus)), f"driver {facts.driver}" if facts.gpus else facts.driver),
        *(_for_jobs(facts) if facts.gpus else []),
        Ability("MPS", _yes(bool(facts.gpus and facts.mps)), facts.mps or "no nvidia-cuda-mps-control"),
        Ability("host pids", _yes(facts.host_pids), "" if facts.host_pids else "a container with pids of its own"),
        Ability("cgroup v2", cgroup, home.why or f"{home.path}: {controllers}"),
        Ability("dmem", _yes(bool(facts.device_regions)), ", ".join(facts.device_regions)),
        Ability("CPU pinning", _yes(facts.cores > 1), f"{facts.cores} cores for this process"),
        Ability("ordered memory", _yes(not facts.unordered), facts.unordered),
        Ability("idle class", _yes(facts.idle_class), "within each session's autogroup" if facts.autogroup else ""),
        Ability("memfd seals", _yes(facts.sealing), "" if facts.sealing else "the gate needs them"),
        Ability("kernel log", _yes(facts.kernel_log), "" if facts.kernel_log else "/dev/kmsg is not readable"),
    ]


def _for_jobs(facts: Facts) -> list[Ability]:
    mode = "; ".join(facts.exclusive)
    mode += "; expected Default (nvidia-smi -c 0, by root)" if mode else "each GPU is for all processes"
    return [
        Ability("compute mode", _yes(not facts.exclusive), mode),
        Ability("CUDA for jobs", _yes(not facts.cuda_lacks), facts.cuda_lacks or "it starts in the whole sandbox"),
    ]


def _bindings(facts: Facts) -> Iterator[Binding]:
    home, no_mps = facts.cgroup, mps_obstacle(len(facts.gpus), bool(facts.mps))
    no_group = home.why or "the control group lacks the controller"
    if home.binds_memory:
        yield Binding("CPU memory", "memory.max over the whole worker, and RLIMIT_DATA per process")
    else:
        yield Binding("CPU memory", "RLIMIT_DATA per process, and a watch over their sum, 5 times a second", no_group)
    if facts.gpus:
        yield _gpu_memory(facts, no_mps)
    if home.binds_processes:
        yield Binding("processes", "pids.max")
    else:
        yield Binding("processes", "a count, 5 times a second, and RLIMIT_NPROC", no_group)
    if facts.gpus:
        uses, instead = "a green context, where driver and PyTorch have them", f"MPS caps commands too, but {no_mps}"
        if not no_mps:
            uses, instead = f"{uses}; with MPS its thread percentage", "a green context does not bind commands"
        yield Binding("SM share", uses, instead)
    yield _sharing(facts)
    if home.path is not None:
        yield Binding("kill", "cgroup.kill, then all descendants")
    else:
        yield Binding("kill", "all descendants, stopped first", home.why)
    if facts.idle_class:
        yield Binding("cores", "the idle scheduling class, on the rank's own cores")
    else:
        yield Binding("cores", "pinning only", "the idle scheduling class is refused here")


def _gpu_memory(facts: Facts, no_mps: str) -> Binding:
    uses = "PyTorch's allocator"
    uses += "" if no_mps else "; with MPS also the driver"
    uses += "; a watch over NVML for what escapes"
    if facts.device_limits:
        uses += f"; dmem.max, set for this whole group: {', '.join(facts.device_limits)}"
    instead = "no dmem.max for a worker: no driver has registered device memory (Linux 6.14, NVIDIA from r615)"
    if facts.device_regions:
        instead = "PipeFill sets no dmem.max for a worker yet"
    if not facts.host_pids:
        instead = f"the watch works only where NVML lists the rank by its own pid: it may mean the host's; {instead}"
    return Binding("GPU memory", uses, instead)


def _sharing(facts: Facts) -> Binding:
    try:
        _, why = choose_sharing("auto", len(facts.gpus), bool(facts.mps), exclusive=bool(facts.exclusive))
    except DeviceError as error:
        return Binding("sharing", "no job can use a GPU", str(error))
    return Binding("sharing", "time-slicing" if facts.gpus else "the cores' scheduler", why)


def _notes(facts: Facts) -> list[str]:
    """The faults that each mode cannot contain."""
    notes = []
    if facts.gpus:
        notes += [
            "time-slicing keeps an illegal access with the worker that made it, but a kernel that never ends holds "
            "the GPU until the worker is killed",
            "MPS does not contain an illegal access: it can end every client of that GPU, the main job too",
            "partitions of MPS, static or otherwise, are not used: what one holds, the main job lacks for good",
            "a green context binds PyTorch's kernels of the task's main thread only",
            "a fault of the GPU itself (Xid, ECC) ends everything on it in any mode",
        ]
    if not facts.cgroup.binds_memory:
        notes.append(
            "without memory.max, a worker has up to 0.2 s before its processes' sum is seen, and some memory of the "
            "kernel's own is in no sum: docs/isolation.md has the numbers"
        )
    if not facts.host_pids and facts.gpus:
        notes.append(
            "in this container memory outside of PyTorch's allocator may be seen only as the GPU's free memory"
        )
    if "cpu" in facts.cgroup.controllers:
        notes.append("the worker's group has the idle class as a whole (cpu.idle), the watcher of a command too")
    return notes


def _yes(value: bool) -> Has:
    return Has.YES if value else Has.NO


def _counted(names: tuple[str, ...]) -> str:
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))

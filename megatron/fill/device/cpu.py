"""The CPU as a worker's device: its limits are on host memory and processes."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time

from megatron.fill.device.port import Limits
from megatron.fill.display import mib
from megatron.fill.linux import tree
from megatron.fill.linux.cgroup import Cgroup, CgroupHome, MemoryGroup, find_home, memory_groups
from megatron.fill.linux.held import Held, HeldMemory
from megatron.fill.linux.host import free_host_bytes
from megatron.fill.linux.oom import OomLog
from megatron.fill.linux.procsettings import ProcSettings
from megatron.fill.linux.reap import end_all

logger = logging.getLogger("pipefill.device")

_GROWTH_BYTES_S = 4 << 30  # no worker writes to new memory faster than this
_KILL_S = 0.5  # part of the time that ``kill`` may take; MPS and the removal of the group have the rest


class HostLimiter:
    """The enforcement of a worker's limits on processes and, unless ``cap_host_memory`` is off, on host memory.

    If there is a control group with the memory controller, the kernel enforces the cap (``memory.max``); else the
    memory of the processes is watched, in addition to the cap of each process by ``sandbox.powers.limit_resources``.
    """

    def __init__(self, limits: Limits, name: str, home: CgroupHome, cap_host_memory: bool = True) -> None:
        self.limits = limits
        self.environment = {tree.MARK: name}
        self._name = name
        self._cap_bytes = limits.memory_bytes if cap_host_memory else None
        self._ending = contextlib.ExitStack()  # of what ``close`` releases, the latest first
        self._cgroup: Cgroup | None = None
        if home.path is not None:
            try:
                self._cgroup = Cgroup(home, name, self._cap_bytes, limits.processes)
                self._ending.callback(self._cgroup.close)
            except OSError as error:
                logger.info("worker %s: no control group: %s", name, error)
        self.alive: list[tree.Process] = []  # living processes as of the latest look
        self._tree: tree.WorkerTree | None = None
        self._pids: set[int] = set()
        self._oom = OomLog()
        self._ending.callback(self._oom.close)
        self.held_bytes = self.peak_bytes = 0
        self._exact_until_s = 0.0  # time until which the latest exact count is valid

    def adopt(self, pid: int, holder: int | None = None) -> None:
        self._tree = tree.WorkerTree(pid, self._name, holder)
        self._ending.callback(self._tree.forget)
        self._pids.add(pid)
        # An init process has made itself unreadable to unprivileged processes; its child has not yet begun the job.
        self._memory = HeldMemory((tree.descendants(pid) or [pid])[0])
        self._ending.callback(self._memory.close)
        self._proc_settings = ProcSettings(pid)
        self._ending.callback(self._proc_settings.restore_autogroup)  # it may have changed it just before its end
        if self._cgroup is None:
            return
        if not self._cgroup.add(pid):
            logger.info("worker %s: it cannot be moved into %s; going on without", self._name, self._cgroup.path)
            self._cgroup.close()
            self._cgroup = None
            return
        for child in tree.descendants(pid):  # forked before, so not in the group yet
            self._cgroup.add(child)

    def look(self) -> str:
        self.alive = self.processes()
        pids = [process.pid for process in self.alive]
        return self._proc_settings.look(pids) or self._check_processes() or self._check_memory(pids)

    def processes(self) -> list[tree.Process]:
        """The worker's living processes."""
        assert self._tree is not None, "adopt comes first"
        processes = self._tree.look(self._members())
        self._pids |= {process.pid for process in processes}
        return processes

    def explain(self) -> str:
        cap, cgroup = self._cap_bytes, self._cgroup
        if cap is not None and cgroup is not None and cgroup.memory_kills():
            peak = max(self.peak_bytes, cgroup.peak_bytes())
            return f"over its cap of {mib(cap)}: the kernel ended it, with a peak of {mib(peak)}"
        reason = self._oom.explain(self._pids)
        return f"{reason} ({mib(self.peak_bytes)} held at most)" if reason else ""

    def busy_s(self) -> float:
        if self._cgroup is not None and (busy_s := self._cgroup.busy_s()) is not None:
            return busy_s
        return sum(process.busy_ticks for process in self.alive) / tree.TICKS_PER_S

    def kill(self) -> None:
        if self._tree is None:
            return
        cgroup = self._cgroup

        def at_once() -> None:
            if cgroup is not None and not cgroup.kill():
                cgroup.freeze()  # SIGKILL also ends frozen processes

        if not end_all(self._tree, _KILL_S, at_once, self._members):
            left = [process.pid for process in self._tree.look(self._members())]
            found = left or "none any more"
            logger.warning("worker %s: not all of its processes can be ended; found are %s", self._name, found)
        self.held_bytes = 0

    def close(self) -> None:
        self._ending.close()

    def _members(self) -> list[int]:
        return self._cgroup.processes() if self._cgroup is not None else []

    def _check_processes(self) -> str:
        assert self._tree is not None
        tasks = sum(process.threads for process in self.alive) + self._tree.zombies
        if tasks > self.limits.processes or (self._cgroup is not None and self._cgroup.refused_forks()):
            return f"over its limit of {self.limits.processes} processes and threads, with {tasks}"
        return ""

    def _check_memory(self, pids: list[int]) -> str:
        cap = self._cap_bytes
        if self._cgroup is not None and self._cgroup.binds_memory:
            self._note(self._cgroup.held_bytes())
            return self.explain() if self._cgroup.memory_kills() else ""
        found = self._memory.count(pids)
        held = found.likely_bytes
        if cap is not None and found.most_bytes > cap:  # only now is the slow, exact count needed
            held = self._exact_bytes(pids, found, cap)
        self._note(held)
        if cap is None or held <= cap:
            return ""
        count = f"{len(pids)} processes" if len(pids) > 1 else "1 process"
        return f"over its cap of {mib(cap)}: {mib(held)} held by {count}, with a peak of {mib(self.peak_bytes)}"

    def _exact_bytes(self, pids: list[int], found: Held, cap: int) -> int:
        """The latest exact count, or a new one if the worker could have exceeded the cap since.

        The worker is stopped for a new count: its processes may be many, and would use the core in the meantime.
        """
        assert self._tree is not None
        if time.monotonic() < self._exact_until_s:
            return self.held_bytes
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._tree.pid, signal.SIGSTOP)
        exact = self._memory.exact_bytes(pids, found)
        held = found.most_bytes if exact is None else exact
        self._exact_until_s = time.monotonic() + (cap - held) / _GROWTH_BYTES_S
        return held

    def _note(self, held_bytes: int) -> None:
        self.held_bytes = held_bytes
        self.peak_bytes = max(self.peak_bytes, held_bytes)


class CpuDevice:
    """The host, or the part of it that this process's control group may use."""

    def __init__(self, home: CgroupHome | None = None, groups: list[MemoryGroup] | None = None) -> None:
        self.name = self.worker_name = "cpu"
        self.overhead_bytes = 0
        self.nodes: tuple[str, ...] = ()
        self._home = find_home() if home is None else home
        self._groups = memory_groups() if groups is None else groups

    def free_bytes(self) -> int:
        # Read each time: an old reading would miss memory that a worker has freed since, and request it twice.
        return min([free_host_bytes(), *(group.room_bytes() for group in self._groups)])

    def energy_j(self) -> None:
        """Return None: the counters of processors are root's, and of the whole socket."""

    def limiter(self, limits: Limits, name: str) -> HostLimiter:
        return HostLimiter(limits, name, self._home)

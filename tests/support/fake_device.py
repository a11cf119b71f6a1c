"""A device in memory, for tests: a machine of pretended processes, and the limiter that watches them."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

from megatron.fill.agent.memory import DeviceMemory
from megatron.fill.device.port import Limits
from megatron.fill.display import mib


@dataclass(slots=True)
class FakeProcess:
    """One pretended process; ``worker`` is the one that it descends from, however it was forked."""

    pid: int
    worker: int
    held_bytes: int = 0


@dataclass(slots=True)
class FakeMachine:
    """All processes, and the memory."""

    total_bytes: int = 1 << 30
    energy_j: float | None = None
    processes: dict[int, FakeProcess] = field(default_factory=dict)
    busy_s: dict[int, float] = field(default_factory=dict)
    _numbers: count[int] = field(default_factory=lambda: count(1000))

    def start(self, held_bytes: int = 0) -> int:
        pid = next(self._numbers)
        self.processes[pid] = FakeProcess(pid, pid, held_bytes)
        return pid

    def fork(self, pid: int, held_bytes: int = 0) -> int:
        child = next(self._numbers)
        self.processes[child] = FakeProcess(child, self.processes[pid].worker, held_bytes)
        return child

    def end(self, pid: int) -> None:
        del self.processes[pid]

    def of(self, worker: int) -> list[FakeProcess]:
        return [process for process in self.processes.values() if process.worker == worker]

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - sum(process.held_bytes for process in self.processes.values())


class FakeLimiter:
    """Keeps ``Limits`` over a pretended worker."""

    def __init__(self, machine: FakeMachine, limits: Limits, name: str) -> None:
        self.environment = {"PIPEFILL_WORKER": name}
        self._machine = machine
        self._limits = limits
        self._worker = 0
        self.held_bytes = self.peak_bytes = 0

    def adopt(self, pid: int, holder: int | None = None) -> None:
        self._worker = pid

    def look(self) -> str:
        processes = self._machine.of(self._worker)
        self.held_bytes = sum(process.held_bytes for process in processes)
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        if len(processes) > self._limits.processes:
            return f"over its limit of {self._limits.processes} processes and threads, with {len(processes)}"
        cap = self._limits.memory_bytes
        if cap is not None and self.held_bytes > cap:
            return f"over its cap of {mib(cap)}: {mib(self.held_bytes)} held, with a peak of {mib(self.peak_bytes)}"
        return ""

    def explain(self) -> str:
        return ""

    def busy_s(self) -> float:
        return self._machine.busy_s.get(self._worker, 0.0)

    def kill(self) -> None:
        for process in self._machine.of(self._worker):
            self._machine.end(process.pid)
        self.held_bytes = 0

    def close(self) -> None:
        pass


class FakeDevice:
    """A device whose memory is a number."""

    def __init__(self, machine: FakeMachine | None = None, name: str = "cpu", overhead_bytes: int = 0) -> None:
        self.name = self.worker_name = name
        self.overhead_bytes = overhead_bytes
        self.nodes: tuple[str, ...] = ()
        self.machine = machine or FakeMachine()

    def free_bytes(self) -> int:
        return self.machine.free_bytes

    def energy_j(self) -> float | None:
        return self.machine.energy_j

    def limiter(self, limits: Limits, name: str) -> FakeLimiter:
        return FakeLimiter(self.machine, limits, name)


def free_memory(free_bytes: int = 1 << 40, margin_bytes: int = 0, overhead_bytes: int = 0) -> DeviceMemory:
    """The memory of a device without processes."""
    return DeviceMemory(FakeDevice(FakeMachine(free_bytes), overhead_bytes=overhead_bytes), margin_bytes, 1.0)

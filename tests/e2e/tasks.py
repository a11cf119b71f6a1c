"""Side tasks for the end-to-end tests: honest ones, and one for every way to misbehave."""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Any

from megatron.fill import SideTask
from megatron.fill.profiles import Configuration
from megatron.fill.sidetask.nodes import NodeTask


def spin(milliseconds: float) -> None:
    end_ns = time.thread_time_ns() + int(milliseconds * 1e6)
    while time.thread_time_ns() < end_ns:
        pass


class Spin(SideTask):
    """Uses the CPU for a while per step, for ever or for ``steps`` steps; resumable."""

    unit = "spins"

    def create(self, milliseconds: float = 1.0, steps: int = 0) -> None:
        self.milliseconds, self.steps, self.done = milliseconds, steps, 0
        self.context.total_work = steps or None

    def run_next_step(self) -> float:
        if self.steps and self.done >= self.steps:
            raise StopIteration
        spin(self.milliseconds)
        self.done += 1
        return 1.0

    def stop(self) -> None:
        self.context.report(done=self.done)

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


class Naps(SideTask):
    """Sleeps in each step: it fills a long wait without the core's time."""

    def run_next_step(self) -> float:
        time.sleep(0.001)
        return 1.0


class Timed(SideTask):
    """Keeps the time of each step in a file, as long as the step counts; resumable."""

    def create(self) -> None:
        self.done, self.begun = 0, False

    def run_next_step(self) -> float:
        with (self.context.directory / "steps").open("ab") as file:
            if not self.begun:  # what an earlier attempt did after its last checkpoint is done again
                file.truncate(8 * self.done)
            spin(1.0)
            file.write(struct.pack("q", time.monotonic_ns()))
        self.done, self.begun = self.done + 1, True
        return 1.0

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


class Noted(SideTask):
    """Does ``steps`` steps of 1 ms, and notes each in its folder: who did it, when, and which; resumable."""

    def create(self, steps: int) -> None:
        self.steps, self.done = steps, 0
        self.name = os.urandom(8).hex()  # of this attempt
        self.context.total_work = steps

    def run_next_step(self) -> float:
        if self.done >= self.steps:
            raise StopIteration
        spin(1.0)
        self.done += 1
        with (self.context.directory / "notes").open("a") as file:
            file.write(f"{self.name} {time.monotonic_ns()} {self.done}\n")
        return 1.0

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


class Waits(SideTask):
    """Keeps its seat, and uses no bubble, until there is a file ``go`` in its folder; then it is done."""

    def create(self) -> None:
        while not (self.context.directory / "go").exists():
            time.sleep(0.1)

    def run_next_step(self) -> float:
        raise StopIteration


class Layers(NodeTask):
    """An iteration is a list of nodes that take the given times, twice that in batches of two; resumable."""

    unit = "samples"
    split = "by hand"

    def create(self, milliseconds: list[float], iterations: int = 0, batches: tuple[int, ...] = (1, 2)) -> None:
        self.milliseconds, self.iterations, self.batches = milliseconds, iterations, batches
        self.samples, self.batch = 0, 0
        self.context.total_work = iterations or None

    def configurations(self) -> list[Configuration]:
        return [Configuration(batch) for batch in self.batches]

    def configure(self, configuration: Configuration) -> None:
        assert self.next_node == 0
        self.batch = configuration.batch_size

    def node_names(self) -> tuple[str, ...]:
        return tuple(f"forward {node}" for node in range(len(self.milliseconds)))

    def iteration_work(self) -> float:
        return float(self.batch)

    def run_next_step(self) -> float:
        if self.next_node == 0 and self.iterations and self.samples >= self.iterations:
            raise StopIteration
        spin(self.milliseconds[self.next_node] * self.batch)
        self.next_node = (self.next_node + 1) % len(self.milliseconds)
        if self.next_node:
            return 0.0
        self.samples += self.batch
        self.context.report(samples=self.samples, batch=self.batch)
        return float(self.batch)

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.samples = state["samples"]


class Faulty(SideTask):
    """Does ``what`` in the callback ``where``; in ``run_next_step`` after a few good steps."""

    def create(self, where: str, what: str) -> None:
        self.where, self.what, self.steps = where, what, 0
        self.maybe("create")

    def init(self) -> None:
        self.maybe("init")

    def start(self) -> None:
        self.maybe("start")

    def run_next_step(self) -> Any:
        self.steps += 1
        spin(0.5)
        if self.steps > 5 and self.where not in ("run_next_step", "state_dict"):
            raise StopIteration
        return self.maybe("run_next_step") if self.steps > 5 else None

    def pause(self) -> None:
        self.maybe("pause")

    def stop(self) -> None:
        self.maybe("stop")

    def maybe(self, where: str) -> Any:
        return getattr(self, self.what)() if where == self.where else None

    def raise_error(self) -> None:
        raise ValueError("made to fail")

    def exit(self) -> None:
        sys.exit(3)

    def hard_exit(self) -> None:
        os._exit(4)

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def segfault(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    def hang(self) -> None:
        while True:
            pass

    def flood(self) -> None:
        os.write(1, b"x" * (1 << 16))  # as much as a pipe holds

    def flood_at_once(self) -> None:
        for _ in range(1 << 14):
            self.flood()

    def nonsense(self) -> str:
        return "a lot"

    def hog(self) -> None:
        self.hoard = bytearray(1 << 30)

    def fork_and_leave(self) -> None:
        if os.fork() == 0:
            with contextlib.suppress(OSError):  # there is no other session for a job
                os.setsid()
            os.execvp("sleep", ["sleep", "86399"])
        raise ValueError("left a child behind")


class Hoard(Spin):
    """Holds memory, and gives back what it is asked for."""

    def create(self, milliseconds: float = 1.0, steps: int = 0, mib: int = 0) -> None:
        super().create(milliseconds, steps)
        self.hoard = [bytearray(b"x" * (1 << 20)) for _ in range(mib)]

    def shrink(self, memory_bytes: int) -> bool:
        del self.hoard[max(0, memory_bytes >> 21) :]  # half of it at least: the rest is Python's own
        self.context.report(left_mib=len(self.hoard))
        return True


class Miser(Hoard):
    """Gives nothing back."""

    def shrink(self, memory_bytes: int) -> bool:
        return False


class Probe(SideTask):
    """Says what it can see, and whom it could signal: were they there, its agent, the warden and the rank."""

    def run_next_step(self) -> float:
        links = (Path("/proc/self/fd") / fd for fd in os.listdir("/proc/self/fd"))
        files = {os.readlink(link).removesuffix(" (deleted)") for link in links if link.is_symlink()}
        reached = []
        for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
            with contextlib.suppress(OSError):
                os.kill(pid, 0)
                reached.append(pid)
        self.context.report(
            environment=sorted(os.environ),
            files=sorted(file for file in files if not file.startswith(("pipe:", "/dev/null", "/proc"))),
            reached=sorted(set(reached) - {os.getpid()}),
            writable=[place for place in ("/etc", sys.prefix, os.getcwd(), "..") if os.access(place, os.W_OK)],
            no_new_privileges="NoNewPrivs:\t1" in Path("/proc/self/status").read_text(),
            directory=os.getcwd(),
        )
        raise StopIteration


class NoTask:
    """Not a SideTask."""

"""Processes that a task forks itself: none goes on as a second worker of the job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.fill.sidetask import ImperativeTask, SideTask, TaskContext
from megatron.fill.sidetask.machine import TaskMachine
from megatron.fill.worker.driven import Driven

END = "machine went on"


class Forks(SideTask):
    """Forks in a callback, and leaves it in the child in one of several ways."""

    def create(self, where: str, how: str) -> None:
        self.where, self.how = where, how
        self.leave("create")

    def leave(self, callback: str) -> None:
        if callback != self.where or os.fork():
            return
        if self.how == "raises":
            raise ValueError("in the child")
        if self.how == "exits":
            sys.exit(3)

    def init(self) -> None:
        self.leave("init")

    def run_next_step(self) -> float:
        self.leave("run_next_step")
        return 7.0


class Runs(ImperativeTask):
    """The same in one call, in which the child also counts work."""

    unit = "turns"

    def create(self, how: str) -> None:
        self.how = how

    def run_gpu_workload(self) -> None:
        child = os.fork()
        self.synchronize(7.0)
        if not child and self.how == "raises":
            raise ValueError("in the child")
        if child:
            os.waitpid(child, 0)


def main(kind: str, *args: str) -> None:
    """Run a task, and print a line where its worker would go on: one line, if only one process does."""
    names = {"Forks": ("where", "how"), "Runs": ("how",)}
    task = Forks() if kind == "Forks" else Driven(Runs(), enter=lambda: None)
    machine = TaskMachine(task, TaskContext("job", Path.cwd()))
    machine.create(dict(zip(names[kind], args, strict=True)))
    machine.init()
    machine.start()
    work = machine.run_next_step()
    while kind == "Runs":
        try:
            work += machine.run_next_step()
        except StopIteration:
            break
    print(END, work, flush=True)
    machine.stop()
    try:
        while True:
            os.wait()
    except ChildProcessError:
        pass


def ran(*args: str) -> subprocess.CompletedProcess[str]:
    """Run ``main`` in a process of its own: a child that went on would go on as this test."""
    code = f"from tests.unit.sidetask.test_forked import main; main(*{args!r})"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)


@pytest.mark.parametrize("where", ["create", "init", "run_next_step"])
@pytest.mark.parametrize(
    ("how", "said"), [("returns", "came back in a process"), ("raises", "ValueError: in the child"), ("exits", "")]
)
def test_a_process_that_a_callback_forked_does_not_go_on_as_the_worker(where, how, said):
    done = ran("Forks", where, how)
    assert done.stdout.splitlines() == [f"{END} 7.0"]
    assert said in done.stderr
    assert (where in done.stderr) == (how != "exits")


@pytest.mark.parametrize("how", ["returns", "raises"])
def test_a_process_that_a_workload_forked_counts_no_work_and_does_not_end_it(how):
    done = ran("Runs", how)
    assert done.stdout.splitlines() == [f"{END} 7.0"]

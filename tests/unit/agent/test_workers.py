"""A worker's first process, and the one that an agent has standing by."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.fill.agent import agent as agent_module
from megatron.fill.agent import workers as workers_module
from megatron.fill.agent.admission import environment
from megatron.fill.agent.workers import WorkerProcess
from megatron.fill.linux.tree import OWN, marked
from megatron.fill.pages.baton import Baton
from megatron.fill.pages.board import CycleBoard
from megatron.fill.pages.control import ControlPage, RunState
from megatron.fill.pages.gate import SharedGate
from megatron.fill.pages.steplog import StepLog, create_log
from megatron.fill.sandbox.config import Sandbox
from megatron.fill.status import Cause
from megatron.fill.work import Work
from megatron.fill.worker.spec import Outcome, WorkerSpec
from scripts.benchmarks.emulated import Emulation, emulation, why_not
from tests.support.posts import Post, post
from tests.support.waiting import until

WITHIN_S = 60.0  # on a machine that is busy
TASK = """
import os
import sys

at_import = "numpy" in sys.modules

from megatron.fill import SideTask


class Look(SideTask):
    def create(self):
        home, word = os.environ["HOME"], os.environ["WORD"]
        self.context.result.update(numpy=at_import, home=home, word=word, cwd=os.getcwd())

    def init(self):
        pass

    def run_next_step(self):
        raise StopIteration
"""

STEP = """
import os

from megatron.fill import SideTask


class Step(SideTask):
    def run_next_step(self):
        self.context.result["class"] = os.sched_getscheduler(0)
        raise StopIteration
"""

CRASH = """
import ctypes
import os
import signal

from megatron.fill import SideTask


class Crash(SideTask):
    def run_next_step(self):
        print("about to")
        if os.environ["HOW"] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        ctypes.string_at(0)
"""


class Pages:
    """What a worker shares with its agent."""

    def __init__(self) -> None:
        self.gate, self.board, self.control = SharedGate(), CycleBoard(), ControlPage.create(0)
        self.log_fd, self.baton_fd = create_log(), Baton.create()
        self.log = StepLog(self.log_fd)
        self.fds = [self.gate.reader_fd(), self.board.reader_fd(), self.control.reader_fd(), self.baton_fd]

    def worker(self, folder: Path, ahead: tuple[str, ...] = ()) -> WorkerProcess:
        spec = SimpleNamespace(user=None, run_dir=str(folder))
        context: Any = SimpleNamespace(spec=spec, worker_fds=tuple(self.fds))
        return WorkerProcess(context, idle=True, ahead=ahead)

    def spec(self, folder: Path, work: Work, **more: Any) -> Path:
        gate, board, control, baton = self.fds
        sandbox = Sandbox((), str(folder))
        path = folder / "spec.json"
        path.write_text(WorkerSpec("look", str(folder), gate, board, control, baton, sandbox, work, **more).to_json())
        return path


@pytest.mark.parametrize("ahead", [(), ("numpy", "no.such.module")])
def test_a_first_process_waits_for_its_job_and_runs_it(tmp_path, ahead):
    pages = Pages()
    worker = pages.worker(tmp_path, ahead)
    (tmp_path / "looks.py").write_text(TASK)
    given = environment(os.environ, {"WORD": "of the device"}, None, tmp_path) | {"HOME": "/of/its/own"}
    worker.give(pages.spec(tmp_path, Work("looks:Look", search=(str(tmp_path),)), environment=given), pages.log_fd)
    report = worker.sandbox_report(WITHIN_S)
    assert report is not None
    assert not report.error
    assert worker.alive
    worker.begin()
    pages.gate.open(1 << 62, 0)
    said, _ = worker.process.communicate(timeout=WITHIN_S)
    outcome = Outcome.left(pages.log)
    assert outcome is not None, said
    expected = {"numpy": bool(ahead), "home": "/of/its/own", "word": "of the device", "cwd": str(tmp_path)}
    assert (outcome.cause, outcome.result) == (Cause.FINISHED, expected), outcome.detail
    assert not worker.alive


@pytest.mark.parametrize("how", ["killed", "crash"])
def test_lines_before_a_crash_are_in_the_output_and_its_traceback(tmp_path, how):
    pages = Pages()
    worker = pages.worker(tmp_path)
    (tmp_path / "crashes.py").write_text(CRASH)
    given = environment(os.environ, {"HOW": how}, None, tmp_path)
    spec = pages.spec(tmp_path, Work("crashes:Crash", search=(str(tmp_path),)), environment=given)
    worker.give(spec, pages.log_fd)
    assert worker.sandbox_report(WITHIN_S) is not None
    worker.begin()
    pages.gate.open(1 << 62, 0)
    said, _ = worker.process.communicate(timeout=WITHIN_S)
    assert worker.process.returncode == -(signal.SIGKILL if how == "killed" else signal.SIGSEGV), said
    assert said.startswith(b"about to\n")
    traced = f'{tmp_path / "crashes.py"}", line 14 in run_next_step'.encode() in said
    assert traced is (how == "crash")


@pytest.mark.skipif(bool(why_not()), reason="real-time priorities are refused here")
def test_a_training_of_the_benchmarks_has_a_program_of_its_own_for_it(tmp_path, monkeypatch):
    for name, value in emulation(Emulation.SLICES).items():
        monkeypatch.setenv(name, value)
    pages = Pages()
    worker = pages.worker(tmp_path)
    (tmp_path / "steps.py").write_text(STEP)
    worker.give(pages.spec(tmp_path, Work("steps:Step", search=(str(tmp_path),))), pages.log_fd)
    assert worker.sandbox_report(WITHIN_S) is not None
    worker.begin()
    pages.gate.open_alone(time.monotonic_ns() + 10**12)
    said, _ = worker.process.communicate(timeout=WITHIN_S)
    outcome = Outcome.left(pages.log)
    assert outcome is not None, said
    assert (outcome.cause, outcome.result) == (Cause.FINISHED, {"class": os.SCHED_FIFO}), outcome.detail


def test_without_a_job_it_ends_when_it_is_told_or_its_agent_has_gone(tmp_path):
    worker = Pages().worker(tmp_path)
    assert worker.alive
    assert worker.end() == ""
    assert worker.process.returncode == -signal.SIGKILL
    with pytest.raises(OSError):  # noqa: PT011
        worker.give(tmp_path, 0)
    code = (
        "import sys, time; from pathlib import Path; from tests.unit.agent.test_workers import Pages; "
        "print(Pages().worker(Path(sys.argv[1])).pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        left = Path(f"/proc/{int(agent.stdout.readline())}")
        agent.kill()
        until(lambda: not left.exists())


class FakeProcess:
    """Counts, and starts nothing."""

    made: list[FakeProcess]

    def __init__(self, context: Any, *, idle: bool, ahead: tuple[str, ...] = ()) -> None:
        self.made.append(self)
        self.name = f"{os.getpid()}-{len(self.made)}"
        self.pid = len(self.made)
        OWN.add(self.pid)
        self.idle, self.ahead = idle, ahead
        self.alive, self.ended = True, False

    def end(self) -> str:
        self.ended = True
        OWN.discard(self.pid)
        return ""


@pytest.fixture
def bench(monkeypatch, tmp_path) -> Iterator[Post]:
    monkeypatch.setattr(FakeProcess, "made", [], raising=False)
    monkeypatch.setattr(workers_module, "WorkerProcess", FakeProcess)
    with post(tmp_path) as made:
        yield made


def start(bench: Post, job: Any) -> FakeProcess:
    found: Any = bench.pool._start(job)
    return found


def job(**spec: Any) -> Any:
    return SimpleNamespace(work=Work(**spec))


def test_a_task_gets_the_process_that_stands_by(bench):
    bench.pool.stand_by()
    bench.pool.stand_by()  # one is enough
    [ready] = FakeProcess.made
    assert ready.idle
    assert ready.ahead
    assert start(bench, job()) is ready
    anew = start(bench, job())
    assert anew is FakeProcess.made[1]
    assert anew.idle
    assert anew.name != ready.name
    assert not anew.ahead


@pytest.mark.parametrize(("spec", "idle"), [({"env": {"OMP_NUM_THREADS": "4"}}, True), ({"command": ("true",)}, False)])
def test_a_command_and_a_job_with_variables_of_its_own_get_one_that_has_imported_nothing(bench, spec, idle):
    bench.pool.stand_by()
    [ready] = FakeProcess.made
    found = start(bench, job(**spec))
    assert found is not ready
    assert (found.idle, found.ahead) == (idle, ())
    assert start(bench, job()) is ready


def test_one_that_has_died_meanwhile_is_not_given_a_job(bench):
    bench.pool.stand_by()
    [dead] = FakeProcess.made
    dead.alive = False
    assert start(bench, job()) is not dead
    assert dead.ended


def test_who_stands_by_is_no_orphan_and_goes_with_a_kill_or_the_end(bench, monkeypatch):
    spared: list[set[int]] = []
    monkeypatch.setattr(workers_module.reap, "end_descendants", lambda: spared.append(OWN & {1, 2, 3}))
    bench.pool.stand_by()
    with bench.pool.worker(job()) as worker:
        bench.pool.stand_by()
        assert bench.pool.working == [worker.pid]
    assert worker.ended
    assert bench.pool.working == []
    standby = FakeProcess.made[-1]
    assert spared == [{standby.pid}]
    bench.control.change(RunState.KILLED)
    bench.pool.stand_down()
    assert standby.ended
    assert standby.pid not in OWN
    bench.pool.stand_by()
    bench.control.change(RunState.RUNNING)
    bench.context.orphaned.set()
    bench.pool.stand_by()
    assert FakeProcess.made[-1] is standby


@pytest.mark.parametrize("resumed", [False, True])
def test_a_kill_is_over_with_the_last_worker_however_late_or_with_the_next_command(bench, monkeypatch, resumed):
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 1000 and resumed:
            bench.control.change(RunState.RUNNING)
        elif len(slept) == 1000:
            bench.pool._working.clear()

    monkeypatch.setattr(agent_module, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: sum(slept)))
    bench.pool._working.add(1)
    bench.control.change(RunState.KILLED)
    agent: Any = SimpleNamespace(context=bench.context, pool=bench.pool)
    agent_module.Agent._control_changed(agent, RunState.KILLED)
    assert len(slept) == 1000


def test_that_none_can_be_started_beforehand_is_no_trouble(bench, monkeypatch):
    def fail(*args: Any, **more: Any) -> None:
        raise OSError(11, "no more processes")

    monkeypatch.setattr(workers_module, "WorkerProcess", fail)
    bench.pool.stand_by()
    assert bench.pool._standby is None


def test_its_command_line_says_whose_it_is_and_its_environment_who(tmp_path):
    worker = Pages().worker(tmp_path)
    try:
        line = Path(f"/proc/{worker.pid}/cmdline")
        until(lambda: line.read_text().endswith(f"\0{tmp_path}\0"))
        until(lambda: marked(worker.pid, worker.name))  # after its command line
    finally:
        worker.end()

"""Watching a worker: it is asked to stop, killed where it must be, and its word or its death is told."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.fill.agent.ending import Ending, How
from megatron.fill.agent.folder import BoundedOutput
from megatron.fill.agent.watch import JobWorker
from megatron.fill.pages.steplog import StepLog, WorkerPhase, create_log
from megatron.fill.status import Cause
from megatron.fill.worker.spec import Outcome

OBEYS = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print('up', flush=True)"
IGNORES = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True)"

HANGS = """
import faulthandler, os, signal
faulthandler.enable()

def hang():
    os.write(1, b"up\\n")
    while True:
        os.kill(os.getpid(), signal.SIGSTOP)

hang()
"""


class Enforcer:
    ending: Ending | None = None
    released = False

    def look(self) -> Ending | None:
        return self.ending

    def check(self) -> float:
        return 0.2

    def release(self) -> None:
        self.released = True


class Limiter:
    """What is beyond the limits, why the kernel ended it, and what was done to it."""

    def __init__(self) -> None:
        self.beyond = self.kernels = ""
        self.calls: list[str] = []

    def look(self) -> str:
        return self.beyond

    def explain(self) -> str:
        return self.kernels

    def kill(self) -> None:
        self.calls.append("kill")


class NoRequest:
    def look(self) -> None:
        return None


class Bench:
    def __init__(self, folder: Path, code: str, most_output: int = 1 << 20, stop_s: float = 10.0) -> None:
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0
        )
        self.folder, self.ticks = folder, 0
        self.enforcer: Any = Enforcer()
        self.log = StepLog(create_log())
        self.wants: list[Ending] = []  # once it is up, in this order
        self.limiter = Limiter()
        self.output = BoundedOutput(folder / "output.log", most_output)
        self.worker = JobWorker(
            process,
            process.pid,
            folder,
            self.log,
            self.output,
            self.limiter,  # type: ignore[arg-type]
            self,
            command=True,
            stop_s=stop_s,
        )
        self.log.unit = "images"

    def look(self) -> Ending | None:
        if not (self.folder / "output.log").read_text() or not self.wants:
            return None
        return self.wants.pop(0) if len(self.wants) > 1 else self.wants[0]

    def tick(self) -> None:
        self.ticks += 1

    def watch(self) -> None:
        self.worker.watch(self.enforcer, NoRequest(), self.tick)

    def outcome(self) -> tuple[Any, ...]:
        self.watch()
        outcome = self.worker.outcome()
        return outcome.cause, outcome.status.text, outcome.unit


def test_a_worker_that_leaves_its_word(tmp_path):
    bench = Bench(tmp_path, "print('hello')")
    Outcome(Cause.FINISHED).leave(bench.log)
    assert bench.outcome() == (Cause.FINISHED, "", "steps")
    assert (tmp_path / "output.log").read_text() == "hello\n"


def test_a_worker_that_dies(tmp_path):
    bench = Bench(tmp_path, "import os; os.kill(os.getpid(), 11)")
    bench.log.phase = WorkerPhase.STEP
    reason = "the worker was killed by SIGSEGV in run_next_step()"
    assert bench.outcome() == (Cause.SIGNAL, reason, "images")


def test_a_worker_is_asked_to_stop(tmp_path):
    bench = Bench(tmp_path, f"{OBEYS}; time.sleep(60)")
    bench.wants = [Ending(How.STOP, Cause.CANCELLED)]
    assert bench.outcome()[0] is Cause.EXITED  # it left no word of its own, but it left
    assert bench.worker.ending == Ending(How.STOP, Cause.CANCELLED)
    assert bench.enforcer.released
    assert bench.ticks > 0


def test_a_worker_that_does_not_stop_is_killed(tmp_path):
    bench = Bench(tmp_path, f"{IGNORES}; time.sleep(60)", stop_s=0.5)
    bench.wants = [Ending(How.STOP, Cause.TRAINING_ENDED)]
    cause, reason, _ = bench.outcome()
    assert cause is Cause.LATE
    assert reason.endswith("did not return within 0.5 s of the stop: the main job ended first")
    assert bench.worker.ending == Ending(How.LATE, Cause.LATE, reason, Cause.TRAINING_ENDED)


def test_a_job_that_belongs_to_another_agent_ends_at_once(tmp_path):
    bench = Bench(tmp_path, f"{IGNORES}; time.sleep(60)")
    bench.wants = [Ending(How.CUT, Cause.CLAIM_LOST)]
    assert bench.outcome()[0] is Cause.CLAIM_LOST
    assert bench.worker.ending == Ending(How.CUT, Cause.CLAIM_LOST)


def test_a_harsher_decision_takes_the_place_of_a_milder_one_and_names_it(tmp_path):
    bench = Bench(tmp_path, f"{IGNORES}; time.sleep(60)")
    bench.wants = [Ending(How.STOP, Cause.MOVES), Ending(How.CUT, Cause.KILLED)]
    assert bench.outcome()[1] == "ended by pipefill kill"
    assert bench.worker.ending == Ending(How.CUT, Cause.KILLED, stop=Cause.MOVES)


def test_one_that_is_asked_to_stop_is_held_to_no_more_rules(tmp_path):
    """To save may take more than to run."""
    bench = Bench(tmp_path, f"{OBEYS}; time.sleep(60)")
    bench.wants = [Ending(How.STOP, Cause.CANCELLED)]
    bench.limiter.beyond = "over its cap of 1 MiB"
    bench.worker._decide([bench, NoRequest()], bench.enforcer, 0.0)  # nobody asks yet
    assert bench.worker.ending is not None
    assert bench.worker.ending.how is How.FAIL
    bench.worker.process.communicate()
    other = Bench(tmp_path, f"{OBEYS}; time.sleep(60)")
    other.wants = [Ending(How.STOP, Cause.CANCELLED)]
    (tmp_path / "output.log").write_text("up")
    other.limiter.beyond = "over its cap of 1 MiB"
    other.outcome()
    assert other.worker.ending == Ending(How.STOP, Cause.CANCELLED)


def test_what_is_beyond_its_limits_ends(tmp_path):
    bench = Bench(tmp_path, f"{IGNORES}; time.sleep(60)")
    bench.limiter.beyond = "over its cap of 1 MiB"
    assert bench.outcome() == (Cause.LIMIT, "over its cap of 1 MiB", "images")
    assert bench.limiter.calls == ["kill", "kill"]  # the worker, and what it left


def test_the_enforcer_is_asked_after_the_rules_which_may_have_stopped_the_worker(tmp_path):
    bench = Bench(tmp_path, "print('up', flush=True); import time; time.sleep(60)")
    calls: list[str] = []
    bench.limiter.look = lambda: calls.append("rules") or ""  # type: ignore[method-assign,func-returns-value]
    bench.enforcer.check = lambda: calls.append("enforcer") or 0.2  # type: ignore[func-returns-value]
    bench.tick = lambda: bench.worker.process.kill() if calls.count("rules") == 3 else None  # type: ignore[method-assign]
    bench.outcome()
    assert "rules" in calls
    assert all(after == "enforcer" for before, after in itertools.pairwise(calls) if before == "rules")


def test_the_kernels_reason_is_told(tmp_path):
    bench = Bench(tmp_path, "import os; os.kill(os.getpid(), 9)")
    bench.limiter.kernels = "the kernel was out of memory"
    assert bench.outcome()[:2] == (Cause.OUT_OF_MEMORY, "the kernel was out of memory")


def test_too_much_output_and_the_enforcers_word_end_a_job(tmp_path):
    flood = Bench(tmp_path, "while True: print('x' * 10000)", most_output=1 << 16)
    assert flood.outcome()[1].startswith("printed more than 0.0625 MiB")
    slow = Bench(tmp_path, f"{IGNORES}; time.sleep(60)")
    slow.enforcer.ending = Ending(How.FAIL, Cause.OVERRUN, "ran on after its bubble")
    assert slow.outcome()[1] == "ran on after its bubble"


@pytest.mark.parametrize("command", [False, True])
def test_a_task_that_hangs_says_where_before_it_is_killed(tmp_path, monkeypatch, command):
    monkeypatch.setattr("megatron.fill.agent.watch._ABORT_S", 60)  # on a busy machine
    bench = Bench(tmp_path, HANGS)
    bench.worker.command = command
    bench.wants = [Ending(How.FAIL, Cause.HUNG, "run_next_step() hung")]
    assert bench.outcome()[:2] == (Cause.HUNG, "run_next_step() hung")
    said = (tmp_path / "output.log").read_text()
    assert ("Fatal Python error: Aborted" in said, "in hang" in said) == (not command, not command)


def test_output_is_read_at_intervals_however_often_a_job_prints(tmp_path, monkeypatch):
    """The interval here is the job's life: one read when it begins to print, one of the rest, one of the end."""
    monkeypatch.setattr("megatron.fill.agent.watch._REST_S", 60)
    bench = Bench(tmp_path, "import time\nfor at in range(100): print(at, flush=True); time.sleep(0.001)")
    pump, reads = bench.worker._pump, []

    def counted(pipe: int) -> bool:
        reads.append(pipe)
        return pump(pipe)

    monkeypatch.setattr(bench.worker, "_pump", counted)
    bench.watch()
    assert (tmp_path / "output.log").read_text().split() == [str(at) for at in range(100)]
    assert len(reads) == 3


def test_what_is_raised_in_the_watch_leaves_no_worker(tmp_path, monkeypatch):
    bench = Bench(tmp_path, f"{IGNORES}; time.sleep(60)")
    bench.limiter.look = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(ZeroDivisionError):
        bench.watch()
    assert bench.worker.process.returncode == -signal.SIGKILL
    assert bench.limiter.calls == ["kill"]

"""Watching a worker: it is asked to stop, killed where it must be, and its word or its death is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from megatron.fill.runtime import jobrun
from megatron.fill.runtime.jobrun import JobRun
from megatron.fill.runtime.spec import Outcome
from megatron.fill.runtime.steplog import StepLog, WorkerPhase, create_log
from megatron.fill.types import JobState

OBEYS = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print('up', flush=True)"
IGNORES = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True)"


class Enforcer:
    verdict: str | None = None
    released = False

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

    def close(self) -> None:
        self.calls.append("close")


class Bench:
    def __init__(self, folder: Path, code: str, most_output: int = 1 << 20) -> None:
        worker = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0
        )
        self.folder, self.enforcer, self.ticks = folder, Enforcer(), 0
        self.log = StepLog(create_log())
        self.stop = self.end = ""
        self.limiter = Limiter()
        self.run = JobRun(
            worker,
            self.log,
            folder,
            self.enforcer,  # type: ignore[arg-type]
            self.limiter,  # type: ignore[arg-type]
            most_output,
            worker.terminate,
            stop=lambda: self._when_up(self.stop),
            end=lambda: self._when_up(self.end),
            ticks=[self.tick],
        )

    def _when_up(self, why: str) -> str:
        return why if (self.folder / "output.log").read_text() else ""

    def tick(self) -> None:
        self.ticks += 1

    def outcome(self) -> tuple[Any, ...]:
        self.run.watch()
        outcome, crashed = self.run.outcome("images")
        return outcome.state, outcome.reason, outcome.unit, crashed


def test_a_worker_that_leaves_its_word(tmp_path):
    bench = Bench(tmp_path, "print('hello')")
    Outcome(JobState.SUCCEEDED, "", unit="steps").leave(bench.log)
    assert bench.outcome() == (JobState.SUCCEEDED, "", "steps", False)
    assert (tmp_path / "output.log").read_text() == "hello\n"


def test_a_worker_that_dies(tmp_path):
    bench = Bench(tmp_path, "import os; os.kill(os.getpid(), 11)")
    bench.log.phase = WorkerPhase.STEP
    reason = "the worker was killed by SIGSEGV in run_next_step()"
    assert bench.outcome() == (JobState.FAILED, reason, "images", True)


def test_a_worker_is_asked_to_stop(tmp_path):
    bench = Bench(tmp_path, f"{OBEYS}; time.sleep(60)")
    bench.stop = "it was cancelled"
    assert bench.outcome()[3]  # it left no word of its own, but it left
    assert bench.run.verdict is None
    assert bench.enforcer.released
    assert bench.ticks > 0


def test_a_worker_that_does_not_stop_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(jobrun, "STOP_S", 0.5)
    bench = Bench(tmp_path, f"{IGNORES}; time.sleep(60)")
    bench.stop = "the main job is over"
    state, reason, _, crashed = bench.outcome()
    assert (state, crashed) == (JobState.FAILED, False)
    assert reason.endswith("did not return within 0.5 s of the stop: the main job is over")
    assert bench.run.late


def test_a_job_that_belongs_to_another_agent_ends_at_once(tmp_path):
    bench = Bench(tmp_path, f"{IGNORES}; time.sleep(60)")
    bench.end = "another agent may have it"
    assert bench.outcome()[1] == "another agent may have it"
    assert bench.run.cut == "another agent may have it"


def test_what_is_beyond_its_limits_ends_and_the_limiter_is_let_go(tmp_path):
    bench = Bench(tmp_path, f"{IGNORES}; time.sleep(60)")
    bench.limiter.beyond = "over its cap of 1 MiB"
    assert bench.outcome()[1:] == ("over its cap of 1 MiB", "images", False)
    assert bench.limiter.calls[-2:] == ["kill", "close"]


def test_the_kernels_reason_is_told(tmp_path):
    bench = Bench(tmp_path, "import os; os.kill(os.getpid(), 9)")
    bench.limiter.kernels = "the kernel was out of memory"
    assert bench.outcome()[1] == "the kernel was out of memory"


def test_too_much_output_and_the_enforcers_word_end_a_job(tmp_path):
    flood = Bench(tmp_path, "while True: print('x' * 10000)", most_output=1 << 16)
    assert flood.outcome()[1].startswith("printed more than 0.0625 MiB")
    slow = Bench(tmp_path, f"{IGNORES}; time.sleep(60)")
    slow.enforcer.verdict = "ran on after its bubble"
    assert slow.outcome()[1] == "ran on after its bubble"

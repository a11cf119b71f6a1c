"""The main job that only waits, and what becomes of a trial when that does not run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.fill.errors import FillError
from megatron.fill.status import Status
from megatron.fill.store.values import Job
from megatron.fill.trial import train as module
from megatron.fill.trial.spec import StandInSpec
from megatron.fill.trial.standin import wait_in_bubbles
from megatron.fill.trial.train import train
from megatron.fill.types import BubbleKind, JobState
from megatron.fill.work import NewJob, Work
from tests.support.memory_store import MemoryStore


class Listener:
    """Notes what it hears, without the times."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.bubbles_ns: list[int] = []
        self._opened_ns = 0

    def bubble_opened(self, kind: BubbleKind, index: int, now_ns: int, free_bytes: int | None = None) -> None:
        self.heard.append(f"opened {kind} {index}")
        self._opened_ns = now_ns

    def bubble_closed(self, now_ns: int) -> None:
        self.heard.append("closed")
        self.bubbles_ns.append(now_ns - self._opened_ns)

    def __getattr__(self, name: str):
        return lambda *given: self.heard.append(name)


def test_it_waits_as_a_rank_does_until_it_is_over():
    listener, slept = Listener(), []

    def over(seconds: float) -> bool:
        slept.append(seconds)
        return len(slept) == 2

    wait_in_bubbles(listener, 0.01, 0.04, over)
    iteration = ["iteration_started", "cycle_started", "opened fwd-bwd 0", "closed", "iteration_ended"]
    assert listener.heard == 2 * iteration
    assert slept == pytest.approx([0.03, 0.03])
    assert min(listener.bubbles_ns) >= 10_000_000


def spec(folder) -> StandInSpec:
    return StandInSpec(str(folder / "run"), "", [], "cpu", 0.01, 0.04)


def test_a_main_job_that_does_not_start_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "program", lambda name: ["sh", "-c", "echo no sandbox >&2; exit 1"])
    store = MemoryStore()
    [job] = store.submit([NewJob("a", Work())])
    with pytest.raises(FillError, match="the main job that the job is tried beside does not run: no sandbox"):
        train(spec(tmp_path), store, job.id, lambda job: False)


def test_it_ends_with_its_standard_input_and_without_records_there_are_none(tmp_path, monkeypatch):
    said = "read line; echo PipeFill: a note; echo other; cat >/dev/null"
    monkeypatch.setattr(module, "program", lambda name: ["sh", "-c", said])
    store = MemoryStore()
    [job] = store.submit([NewJob("a", Work())])
    log = tmp_path / "run.log"
    run = train(spec(tmp_path), store, job.id, lambda job: "other" in log.read_text())
    assert (run.record, run.worker, run.rank, run.notes) == (None, None, None, ["a note"])


@pytest.mark.parametrize(
    ("state", "attempt", "over"),
    [
        (JobState.QUEUED, 1, False),  # not taken yet
        (JobState.RUNNING, 2, False),
        (JobState.QUEUED, 2, True),  # given back
        (JobState.RUNNING, 3, True),  # and taken again
        (JobState.FAILED, 2, True),
        (JobState.SUCCEEDED, 2, True),
    ],
)
def test_a_run_is_over_with_the_first_attempt(state, attempt, over):
    [job] = MemoryStore().submit([NewJob("a", Work())])
    now: Job = replace(job, status=Status(state), attempt=attempt)
    assert module._over(now, before=1) is over

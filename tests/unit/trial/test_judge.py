"""What the records of a trial say of a job."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from megatron.fill.folders import output_file
from megatron.fill.given.jobs import JobSpec
from megatron.fill.status import Cause, JobState, Status, Then
from megatron.fill.store.values import Job, Progress
from megatron.fill.trial.examine import Examined
from megatron.fill.trial.judge import judge
from megatron.fill.trial.printed import print_trial
from megatron.fill.trial.result import Checkpoint, Ended, Options, RoundTrip, Trial
from megatron.fill.trial.run import _enough, refused
from megatron.fill.trial.train import TrialTraining
from megatron.fill.types import Bubble, BubbleKind, BubbleUse, JobRecord, RankInfo, RankRecord, WorkerRecord
from megatron.fill.work import NewJob, Work
from tests.support.memory_store import MemoryStore

MS = 1_000_000
WORK = JobSpec(name="count", task="counts:Count", memory="256MiB")  # type: ignore[arg-type]
OPTIONS = Options(bubble_ms=50, period_ms=200)
ALL = dict.fromkeys(
    ("create()", "load_state_dict()", "init()", "start()", "pause()", "state_dict()", "stop()"), MS // 8
)
STEP_MS, STEPS = 2, 20  # in each of ten bubbles of 50 ms
RESUMABLE = Examined(resumable=True)


def stored(**changes: Any) -> Job:
    [job] = MemoryStore().submit([NewJob("count", Work())])
    usual: dict[str, Any] = {"directory": "", "attempt": 1, "progress": Progress(200.0, unit="turns")}
    return replace(job, **usual | changes)


CUT = Status(JobState.QUEUED, Cause.TRAINING_ENDED, then=Then.SAVED)


def run(status: Status = CUT, **changes: Any) -> TrialTraining:
    """A run of ten bubbles, of which the job used the last eight.

    Args:
        changes: of the records of job and worker, and ``progress``.
    """
    bubbles = [
        Bubble(at, 0, BubbleKind.FWD_BWD, 200 * MS * at, 200 * MS * at + 50 * MS, seq=at, filling=True)
        for at in range(1, 11)
    ]
    steps, uses = [], []
    for bubble in bubbles[2:]:
        begins = [bubble.start_ns + MS + at * STEP_MS * MS for at in range(STEPS)]
        steps += [(begin, begin + STEP_MS * MS) for begin in begins]
        uses.append(BubbleUse(bubble.seq, MS, STEPS * STEP_MS * MS, 0, STEPS))
    worker = WorkerRecord("count", 0, len(steps), 160.0, 8 * 40 * MS, 0, 0.0, uses, steps, ALL)
    record = JobRecord("count", "counts:Count", status, 160.0, "turns", ended_ns=10**12, peak_bytes=30 << 20)
    fields = {name: changes.pop(name) for name in ("ended_ns", "violations") if name in changes}
    progress = changes.pop("progress", Progress(200.0, unit="turns", resumable=True))
    worker = replace(worker, **changes)
    info = RankInfo(0, 1, 0, 1, 0, 1, 0, 1)
    rank = RankRecord(info, [], bubbles, [])
    return TrialTraining(stored(status=status, progress=progress), replace(record, **fields), worker, rank, [])


def judged(
    *runs: TrialTraining, found: Examined = RESUMABLE, job: JobSpec = WORK, size: int = 119, **options: Any
) -> Trial:
    return judge(job, found, runs, size, replace(OPTIONS, **options))


FIRST = run(work_done=40.0, progress=Progress(40.0, unit="turns", resumable=True))


def test_a_good_task():
    trial = judged(FIRST, run())
    assert (trial.ended, trial.reason, trial.finished) == (Ended.OK, "", False)
    assert trial.checkpoint == Checkpoint(RoundTrip.OK, 119, 40.0, 40.0)
    assert trial.steps is not None
    assert (trial.steps.count, trial.steps.p50_ms, trial.steps.p99_ms, trial.steps.longest_ms) == (160, 2, 2, 2)
    assert trial.use is not None
    assert (trial.use.bubbles, trial.use.used, trial.use.first_step_us) == (8, pytest.approx(0.8), 1000)
    assert (trial.use.overran, trial.use.longest_overrun_ms, trial.use.violations) == (0, 0, 0)
    assert (trial.peak_bytes, trial.memory_bytes, trial.work_done) == (30 << 20, 256 << 20, 200.0)
    assert (trial.hints, trial.output) == ([], [])


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        (run(Status(JobState.FAILED, Cause.FAILED, "ValueError: x in pause()")), "ValueError: x in pause()"),
        (
            run(Status(JobState.QUEUED, Cause.SIGNAL, "SIGSEGV in init()", Then.TRIED_AGAIN)),
            "the worker was killed by SIGSEGV in init()",
        ),
        (
            run(Status(JobState.QUEUED, Cause.DOES_NOT_FIT, "node 'a' is too long", device="rank 0")),
            "does not fit rank 0: node 'a' is too long",
        ),
        (run(callbacks={}), "create() had not returned after 120 s (--startup-seconds)"),
        (run(callbacks={"create()": 1}), "init() had not returned after 120 s (--startup-seconds)"),
        (run(steps_done=0), "run_next_step() did not return once in 5 s of bubbles"),
        (run(callbacks={"create()": 1, "init()": 1}), "state_dict() or stop() did not return within 10 s of the end"),
        (
            run(callbacks={name: 1 for name in ALL if name != "stop()"}),
            "stop() did not return within 10 s of the end",
        ),
    ],
)
def test_why_a_task_would_fail(last, reason):
    trial = judged(last)
    assert (trial.ended, trial.reason) == (Ended.FAILED, reason)


def test_a_job_that_no_worker_was_started_for():
    nothing = TrialTraining(stored(status=Status(JobState.QUEUED, Cause.NO_MEMORY, "1 MiB")), None, None, None, [])
    assert judged(nothing).reason == "too little memory: 1 MiB"
    silent = TrialTraining(stored(), None, None, None, [])
    assert judged(silent).reason == "no worker was ready within 120 s (--startup-seconds)"


def test_nodes_that_are_still_being_measured():
    trial = judged(run(callbacks={}), found=Examined(nodes=True))
    assert trial.reason == "the measuring of its nodes in bubbles had not ended after 120 s (--startup-seconds)"


@pytest.mark.parametrize(
    ("runs", "found", "outcome", "reason"),
    [
        (
            (FIRST, run(progress=Progress(190.0, unit="turns"))),
            RESUMABLE,
            "failed",
            None,
        ),
        ((FIRST, run(callbacks={name: 1 for name in ALL if name[:4] != "load"})), RESUMABLE, "failed", None),
        ((run(Status(JobState.SUCCEEDED, Cause.FINISHED)),), RESUMABLE, "never saved", ""),
        ((run(Status(JobState.FAILED, Cause.FAILED, "no")),), RESUMABLE, "never saved", "no"),
        ((run(),), RESUMABLE, "failed", "no checkpoint could be written; its output says why"),
        ((run(progress=Progress(1.0)),), RESUMABLE, "not resumable", ""),  # its state_dict() gave None
        ((run(),), Examined(), "not resumable", ""),
    ],
)
def test_what_came_of_the_checkpoint(runs, found, outcome, reason):
    trial = judged(*runs, found=found, size=119 if len(runs) > 1 else 0)
    assert trial.checkpoint.outcome == outcome
    assert reason is None or trial.reason == reason


def test_work_that_was_lost_is_told():
    trial = judged(FIRST, run(progress=Progress(190.0, unit="turns")))
    assert trial.reason == "saved at 40 turns, it went on from 30"


def test_the_part_of_an_iteration_that_is_not_saved_is_not_missed():
    first = run(progress=Progress(40.5, unit="turns", resumable=True), partial_work=0.5)
    assert judged(first, run()).checkpoint.outcome is RoundTrip.OK


def test_a_command_has_no_callbacks():
    command = JobSpec(name="zip", command="gzip x")  # type: ignore[arg-type]
    trial = judged(run(callbacks={}), found=Examined(), job=command)
    assert (trial.ended, trial.command, trial.steps) == (Ended.OK, True, None)
    assert trial.hints[-1] == "A command begins again from its start in every run that does not finish it."


@pytest.mark.parametrize(
    ("last", "hint"),
    [
        (run(steps=[(0, 60 * MS)] * 5), "A step takes 60 ms and a bubble 50 ms"),
        (run(steps=[(0, 20 * MS)] * 5), "Half a step is lost in every bubble, 20% of it here"),
        (run(steps=[(0, 2 * MS)] * 50 + [(0, 9 * MS)]), "The slowest steps take 4 times the median"),
        (run(callbacks=ALL | {"pause()": 9 * MS}), "pause() took up to 9 ms of a bubble of 50 ms"),
        (run(violations=2), "by more than 500 ms (grace_ms) 2 times; 3 times (max_overruns) end a job"),
    ],
)
def test_what_would_make_it_better(last, hint):
    [said] = judged(FIRST, last).hints
    assert hint in said


def test_a_task_that_tells_its_steps_apart_is_not_told_to():
    uneven = run(steps=[(0, 2 * MS)] * 50 + [(0, 9 * MS)])
    assert judged(FIRST, uneven, found=Examined(nodes=True, resumable=True)).hints == []


def test_a_job_without_a_cap_is_told_one_that_would_do():
    [said] = judged(FIRST, run(), job=WORK.model_copy(update={"memory": None})).hints
    assert "`memory: 64MiB`" in said


def shown(trial: Trial) -> str:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_trial(trial, console)
    return console.export_text()


def test_it_is_printed_in_80_columns():
    trial = replace(judged(FIRST, run()), total_work=1e6, result={"loss": 0.5, "text": "x" * 5000}, folder="/tmp/x")
    text = shown(trial)
    assert max(map(len, text.splitlines())) <= 80
    words = " ".join(text.split())
    for said in (
        "count: counts:Count on cpu",
        "run_next_step() 2.000 ms 160 steps: p50 2.000 ms, p99 2.000 ms",
        "load_state_dict() 0.125 ms",
        "8 of 50 ms, one every 200 ms: 80% of their time inside steps",
        "overruns none beyond the grace of 500 ms",
        "memory 30 MiB at most, of 256 MiB",
        "checkpoint 119 bytes: saved at 40 turns, and a new process went on from there",
        "work 200 of 1e+06 turns",
        f"result loss 0.5, text {'x' * 37}...",
        "It would run.",
        "Its folder: /tmp/x",
    ):
        assert said in words


@pytest.mark.parametrize("begun_again", [False, True])
def test_a_crash_is_shown_from_its_traceback_on_also_if_the_job_has_begun_again(tmp_path, begun_again):
    died = run(Status(JobState.QUEUED, Cause.SIGNAL, "SIGSEGV in run_next_step()", Then.TRIED_AGAIN))
    assert died.record is not None
    folder = tmp_path / "jobs" / "count-1"
    output = output_file(folder, 1 if begun_again else None)
    output.parent.mkdir()
    output.write_text("step 5\nFatal Python error: Segmentation fault\n\nCurrent thread\n")
    job = replace(died.job, directory=str(folder), attempt=2 if begun_again else 1)
    trial = judged(replace(died, job=job, record=replace(died.record, attempt=1)))
    assert trial.output == ["Fatal Python error: Segmentation fault", "", "Current thread"]


def test_a_failure_is_printed_with_its_output_and_commands_no_terminal():
    found = Examined("importing x failed: \x1b[2J", True, "Traceback\n  [red]line\x1b[2J")
    text = shown(refused(WORK, found, "cpu"))
    assert "\x1b" not in text
    assert "It would fail: importing x failed:" in text
    assert "  [red]line^[[2J" in text
    assert "It cannot run: x has no Y" in shown(refused(WORK, Examined("x has no Y"), "cpu"))


class TestWaiting:
    """When a run has been long enough, by what the store says of its job."""

    before = stored(attempt=1, progress=Progress(startup_s=1.5), started_s=0.0)

    def test_what_the_store_has_of_the_run_before_says_nothing(self):
        enough = _enough(replace(OPTIONS, startup_seconds=60), self.before, until_saved=False)
        assert not enough(self.before)
        assert not enough(replace(self.before, attempt=2, started_s=1.0))
        assert enough(replace(self.before, attempt=2, started_s=1.0, progress=Progress(startup_s=1.6)))

    def test_a_task_that_does_not_start_is_not_waited_for_for_ever(self):
        assert _enough(replace(OPTIONS, startup_seconds=0), self.before, until_saved=False)(self.before)

    def test_one_that_was_saved(self, tmp_path):
        (tmp_path / "checkpoint.pt").touch()
        saved = replace(self.before, directory=str(tmp_path))
        assert _enough(OPTIONS, self.before, until_saved=True)(saved)
        assert not _enough(OPTIONS, self.before, until_saved=False)(saved)

"""Evaluation of a trial: from the records of its runs to its result, with hints for improving the job."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron.fill import untrusted
from megatron.fill.agent.watch import STOP_S
from megatron.fill.config import FillSettings
from megatron.fill.folders import output_file
from megatron.fill.given.jobs import JobSpec
from megatron.fill.status import Cause, JobState, Then
from megatron.fill.trial.examine import Examined
from megatron.fill.trial.result import Checkpoint, Ended, Options, RoundTrip, Steps, Trial, Use
from megatron.fill.trial.steptimes import nearest_rank
from megatron.fill.trial.train import TrialTraining
from megatron.fill.types import JobRecord, RankRecord, WorkerRecord

_OUTPUT_LINES = 20
_TRACEBACKS = "Traceback (most recent call last):", "Fatal Python error: "  # the second is of a crash
# Of hints:
_MIB = 1 << 20
_LONG = 0.2  # share of a bubble above which a step wastes a good part of it
_SLOW = 0.1  # share of a bubble above which start() or pause() is slow
_UNEVEN, _UNEVEN_MS = 3.0, 1.0  # ratio of p99 to median, and their difference, above which steps are uneven
_FEW = 100  # number of steps below which p99 is not meaningful


def judge(job: JobSpec, found: Examined, runs: Sequence[TrialTraining], size_bytes: int, options: Options) -> Trial:
    """Return the result of a job's trial.

    ``runs`` are one run, or two, of which the second resumed from the first one's checkpoint of ``size_bytes``.
    """
    last = runs[-1]
    record, worker = last.record, last.worker
    checkpoint = _round_trip(found, runs, size_bytes, options)
    reason = _reason(last, job, found, options) or _lost(checkpoint, last.job.progress.unit)
    settings = FillSettings(**options.settings)
    trial = Trial(
        job=job.name,
        what=job.what,
        device=options.device,
        ended=Ended.FAILED if reason else Ended.OK,
        reason=reason,
        finished=record is not None and record.state is JobState.SUCCEEDED,
        command=job.command is not None,
        bubble_ms=options.bubble_ms,
        period_ms=options.period_ms,
        grace_ms=settings.grace_ms,
        unit=last.job.progress.unit,
        work_done=last.job.progress.work_done,
        total_work=last.job.progress.total_work,
        callbacks_ms=_callbacks(runs),
        steps=None if worker is None or job.command is not None else _steps(worker),
        use=None if record is None or worker is None or last.rank is None else _use(last.rank, worker, record),
        peak_bytes=max((run.record.peak_bytes for run in runs if run.record is not None), default=0),
        memory_bytes=job.memory,
        checkpoint=checkpoint,
        result=last.job.result,
        output=_output(last) if reason else [],
        folder=last.job.directory,
    )
    trial.hints.extend(_hints(trial, settings.max_overruns, found.nodes))
    return trial


def _reason(last: TrialTraining, job: JobSpec, found: Examined, options: Options) -> str:
    """Return the reason why the job failed; empty if it did not."""
    record, worker = last.record, last.worker
    if record is None or worker is None:
        return last.job.reason or f"no worker was ready within {options.startup_seconds:g} s (--startup-seconds)"
    if record.state is JobState.SUCCEEDED:
        return ""
    if record.state is JobState.QUEUED and record.status.cause is Cause.TRAINING_ENDED:
        return "" if job.command is not None else _not_returned(worker, found, options)
    return record.status.text if record.status.then is not Then.TRIED_AGAIN else record.status.why


def _not_returned(worker: WorkerRecord, found: Examined, options: Options) -> str:
    """Return the callback that had not returned when the task was stopped, as a message; empty if there is none."""
    late = f"had not returned after {options.startup_seconds:g} s (--startup-seconds)"
    if "create()" not in worker.callbacks:
        if found.nodes:
            return f"the measuring of its nodes in bubbles {late.replace('returned', 'ended')}"
        return f"create() {late}"
    if "init()" not in worker.callbacks:
        return f"init() {late}"
    if not worker.steps_done:
        return f"run_next_step() did not return once in {options.seconds:g} s of bubbles"
    if "stop()" not in worker.callbacks:
        saving = found.resumable and "state_dict()" not in worker.callbacks
        return f"{'state_dict() or stop()' if saving else 'stop()'} did not return within {STOP_S:g} s of the end"
    return ""


def _round_trip(found: Examined, runs: Sequence[TrialTraining], size_bytes: int, options: Options) -> Checkpoint:
    if not found.resumable:
        return Checkpoint(RoundTrip.NOT_RESUMABLE)
    if not options.round_trip:
        return Checkpoint(RoundTrip.NOT_TRIED)
    first = runs[0]
    if len(runs) == 1:
        if first.job.state is not JobState.QUEUED or first.worker is None or not first.worker.steps_done:
            return Checkpoint(RoundTrip.NEVER_SAVED)
        return Checkpoint(RoundTrip.FAILED if first.job.progress.resumable else RoundTrip.NOT_RESUMABLE)
    second = runs[1]
    saved = first.job.progress.work_done - (first.worker.partial_work if first.worker is not None else 0.0)
    loaded = second.job.progress.work_done - (second.worker.work_done if second.worker is not None else 0.0)
    went_on = second.worker is not None and "load_state_dict()" in second.worker.callbacks
    same = went_on and math.isclose(saved, loaded, rel_tol=1e-9, abs_tol=1e-9)
    return Checkpoint(RoundTrip.OK if same else RoundTrip.FAILED, size_bytes, saved, loaded)


def _lost(checkpoint: Checkpoint, unit: str) -> str:
    if checkpoint.outcome is not RoundTrip.FAILED:
        return ""
    if not checkpoint.size_bytes:
        return "no checkpoint could be written; its output says why"
    return f"saved at {checkpoint.saved_work:g} {unit}, it went on from {checkpoint.loaded_work:g}"


def _callbacks(runs: Sequence[TrialTraining]) -> dict[str, float]:
    longest: dict[str, float] = {}
    for worker in (run.worker for run in runs if run.worker is not None):
        for callback, took_ns in worker.callbacks.items():
            longest[callback] = max(longest.get(callback, 0.0), took_ns / 1e6)
    return longest


def _steps(worker: WorkerRecord) -> Steps | None:
    times = sorted(end_ns - start_ns for start_ns, end_ns in worker.steps)
    if not times:
        return None
    at = [nearest_rank(times, share) / 1e6 for share in (0.5, 0.99, 1.0)]
    return Steps(worker.steps_done, *at)


def _use(rank: RankRecord, worker: WorkerRecord, record: JobRecord) -> Use | None:
    first = next((use.seq for use in worker.uses if not use.idle), None)
    if first is None:
        return None
    open_ns = [one.duration_ns for one in rank.bubbles if one.seq >= first and one.end_ns <= record.ended_ns]
    latencies = sorted(use.latency_ns for use in worker.uses if use.latency_ns >= 0)
    overruns = [use.overrun_ns for use in worker.uses if use.overrun_ns]
    return Use(
        bubbles=len(open_ns),
        used=min(1.0, worker.harvested_ns / sum(open_ns)) if open_ns else 0.0,
        first_step_us=latencies[len(latencies) // 2] / 1e3 if latencies else None,
        overran=len(overruns),
        longest_overrun_ms=max(overruns, default=0) / 1e6,
        violations=record.violations,
    )


def _output(last: TrialTraining) -> list[str]:
    """Return the end of the output of the attempt that the record is of, from its last traceback on if there is one."""
    job, record = last.job, last.record
    if not job.directory:
        return []
    earlier = record.attempt if record is not None and record.attempt < job.attempt else None  # it has begun again
    try:
        path = output_file(Path(job.directory), earlier)
        lines = untrusted.read_text(path).splitlines()
    except (OSError, ValueError):
        return []
    starts = [at for at, line in enumerate(lines) if line.startswith(_TRACEBACKS)]
    return lines[starts[-1] :] if starts else lines[-_OUTPUT_LINES:]


def _hints(trial: Trial, max_overruns: int, kinds: bool) -> Iterator[str]:
    """Yield the hints, a sentence or two each; steps of several ``kinds`` (nodes) are expected to be uneven."""
    for callback in ("start()", "pause()"):
        took_ms = trial.callbacks_ms.get(callback, 0.0)
        if took_ms > _SLOW * trial.bubble_ms:
            yield f"{callback} took up to {took_ms:.3g} ms of a bubble of {trial.bubble_ms:g} ms."
    if trial.ended is not Ended.OK:
        return
    if trial.steps is not None:
        yield from _of_steps(trial.steps, trial.bubble_ms, kinds)
    if trial.use is not None and trial.use.violations:
        times = f"{trial.use.violations} times" if trial.use.violations > 1 else "once"
        beyond = f"It ran on after its bubble by more than {trial.grace_ms:g} ms (grace_ms) {times}"
        yield f"{beyond}; {max_overruns} times (max_overruns) end a job."
    if trial.memory_bytes is None and trial.peak_bytes:
        cap_mib = -(-3 * trial.peak_bytes // (2 * 64 * _MIB)) * 64  # 1.5 times the peak, in steps of 64 MiB
        yield f"It has no cap: with `memory: {cap_mib}MiB` it could harm nobody beyond that."
    if trial.command or trial.checkpoint.outcome is RoundTrip.NOT_RESUMABLE:
        what = "A command" if trial.command else "Without state_dict() and load_state_dict() it"
        yield f"{what} begins again from its start in every run that does not finish it."
    elif trial.checkpoint.outcome is RoundTrip.NEVER_SAVED:
        yield "It was done before it could be saved: with more work, its checkpoint would be tried too."


def _of_steps(steps: Steps, bubble_ms: float, kinds: bool) -> Iterator[str]:
    if steps.p50_ms > bubble_ms:
        yield (
            f"A step takes {steps.p50_ms:.3g} ms and a bubble {bubble_ms:g} ms: beside a training on a GPU hardly any "
            "would begin. Make steps shorter."
        )
    elif steps.p50_ms > _LONG * bubble_ms:
        lost = steps.p50_ms / 2 / bubble_ms
        yield f"Half a step is lost in every bubble, {lost:.0%} of it here: shorter steps use more."
    if kinds or steps.count < _FEW:
        return
    if steps.p99_ms > _UNEVEN * steps.p50_ms and steps.p99_ms - steps.p50_ms > _UNEVEN_MS:
        times = f"{steps.p99_ms / steps.p50_ms:.0f} times the median"
        yield f"The slowest steps take {times}: if that is their nature, tell kinds of steps apart with next_node."

"""Jobs as tables for people and as JSON for programs.

A job whose agent's lease has expired is shown as ``LOST``: in the store it stays RUNNING until an agent looks for a
job, which after a kill may be never.  ``now_s`` is always the store's time (``JobStore.now_s``).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from megatron.fill.console import console_of, facts_table, literal
from megatron.fill.display import STATE_COLOURS, plain_table
from megatron.fill.store import Job
from megatron.fill.store.states import not_succeeded
from megatron.fill.types import JobState

_PIPE_WIDTH = 160  # columns, if the output does not go to a terminal
_MOST_S = 1e11  # three thousand years: longer times are shown as "never"
_LOST = "LOST"
_FIRSTS_SHOWN = 5


def percent(job: Job) -> float | None:
    total = job.progress.total_work
    return min(100.0, 100 * job.progress.work_done / total) if total else None


def remaining_s(job: Job, now_s: float) -> float | None:
    """Return the remaining seconds of a running job at its present rate; None if unknown."""
    progress = job.progress
    if not _runs(job, now_s) or progress.total_work is None or not progress.rate:
        return None
    return max(0.0, progress.total_work - progress.work_done) / progress.rate


def _runs(job: Job, now_s: float) -> bool:
    return job.state is JobState.RUNNING and not job.lost(now_s)


def as_dict(job: Job, now_s: float) -> dict[str, Any]:
    """Return the job's JSON as ``pipefill show --help`` documents it."""
    values = asdict(job)
    left_s = remaining_s(job, now_s)
    lost = job.lost(now_s)
    del values["status"]
    values |= values.pop("progress")
    return values | {
        "state": _LOST if lost else job.state,
        "cause": job.status.cause,
        "reason": job.reason,
        "rate": job.progress.rate if _runs(job, now_s) else None,
        "lost_s": job.lease_until_s if lost else None,
        "percent": percent(job),
        "remaining_s": left_s,
        "ends_s": None if left_s is None else time.time() + left_s,
    }


def print_json(value: object) -> None:
    print(json.dumps(_finite(value), indent=2))


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, by null."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_table(jobs: list[Job], now_s: float) -> None:
    """Print a line for each job, in 80 columns, and then the reason of each failed one, cut to a line."""
    if not jobs:
        print("There are no jobs.")
        return
    several_users = len({job.user for job in jobs}) > 1
    users = ["USER"] if several_users else []
    table = plain_table(">ID", "NAME", *users, "<STATE", "DONE", ">%", ">RATE", ">LEFT")
    table.columns[1].min_width = 12
    if users:
        table.columns[2].max_width = 12
    for job in jobs:
        user = [literal(job.user)] if several_users else []
        left = _duration(remaining_s(job, now_s))
        cells = [literal(_done(job)), literal(_percent(job)), literal(_rate(job, now_s)), literal(left)]
        table.add_row(literal(str(job.id)), literal(job.name), *user, _state(job, now_s), *cells)
    console = console_of(_PIPE_WIDTH)
    console.print(table)
    for job in jobs:
        if job.state is JobState.FAILED and job.reason:
            line = literal(f"FAILED {job.name} ({job.id}): {job.reason}")
            console.print(line, no_wrap=True, overflow="ellipsis")
    if any(job.lost(now_s) for job in jobs):
        print("LOST: its agent is not heard of any more; it goes on when a training serves this store again.")


def print_job(job: Job, now_s: float, firsts: Mapping[str, JobState]) -> None:
    """Print all that is known about a job, with the states of the jobs that it waits for, a line for each field."""
    progress, left_s = job.progress, remaining_s(job, now_s)
    done = f"{_done(job)} {f'({_percent(job)}%)' if _percent(job) else ''}"
    lines = {
        "job": f"{job.name} ({job.id})",
        "lost": _since(job, now_s) if job.lost(now_s) else "",
        "reason": job.reason,
        "what": job.work.what,
        "args": json.dumps(job.work.args) if job.work.args else "",
        "user": job.user,
        "priority": str(job.priority),
        "after": _after(firsts),
        "attempt": str(job.attempt) if job.attempt else "",
        "retries": f"{progress.failures} of {retries} used" if (retries := job.work.retries) else "",
        "timeout": _duration(job.work.timeout_s),
        "device": job.device,
        "folder": job.directory,
        "done": done,
        "rate": _rate(job, now_s),
        "ends": "" if left_s is None else f"{_moment(time.time() + left_s)} (in {_duration(left_s)})",
        "on devices": f"{_duration(progress.harvested_s)}, {progress.steps} steps" if progress.steps else "",
        "saved": _moment(progress.checkpoint_s),
        "submitted": _moment(job.submitted_s),
        "deadline": _moment(job.deadline_s),
        "started": _moment(job.started_s),
        "finished": _moment(job.finished_s),
        "result": json.dumps(job.result) if job.result else "",
    }
    facts = [(name, literal(value.strip())) for name, value in lines.items() if value.strip()]
    console_of(_PIPE_WIDTH).print(facts_table([("state", _state(job, now_s)), *facts]))


def _state(job: Job, now_s: float) -> Any:
    if job.lost(now_s):
        return literal(_LOST, "red")
    stopping = job.cancelling and job.state is JobState.RUNNING
    return literal("CANCELLING" if stopping else str(job.state), STATE_COLOURS[job.state])


def _since(job: Job, now_s: float) -> str:
    """Describe when a lost job's lease ended, and what happens to the job next."""
    assert job.lease_until_s is not None
    ago = _duration(now_s - job.lease_until_s)
    fate = "is cancelled" if job.cancelling else "goes on from its last checkpoint, or begins again,"
    return (
        f"its agent's lease ended {_moment(job.lease_until_s)} ({ago} ago); "
        f"it {fate} when a training serves this store again"
    )


def _done(job: Job) -> str:
    progress = job.progress
    if not progress.work_done and progress.total_work is None:
        return ""
    of = "" if progress.total_work is None else f"/{_number(progress.total_work)}"
    return f"{_number(progress.work_done)}{of} {progress.unit}"


def _percent(job: Job) -> str:
    share = percent(job)
    if share is None:
        return ""
    # Rounded down while work is left, so that 100 means done.
    return f"{math.ceil(share) if job.state is JobState.SUCCEEDED else math.floor(share)}"


def _rate(job: Job, now_s: float) -> str:
    rate = job.progress.rate
    return "" if rate is None or not _runs(job, now_s) else f"{_number(rate)}/s"


def _number(value: float) -> str:
    """Format with about three digits: 7, 0.25, 1.44k, 28.7M."""
    if not abs(value) < 1e15:
        return f"{value:.3g}"
    for unit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            scaled = value / unit
            return (f"{scaled:.3g}" if abs(scaled) < 999.5 else f"{scaled:.0f}") + suffix
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _after(firsts: Mapping[str, JobState]) -> str:
    """List those that have not succeeded by name, and the others as a number."""
    rest = not_succeeded(firsts, firsts)
    shown = [*rest[:_FIRSTS_SHOWN], *(["..."] if len(rest) > _FIRSTS_SHOWN else [])]
    if len(rest) < len(firsts):
        shown.append(f"{len(firsts) - len(rest)} of {len(firsts)} SUCCEEDED")
    return ", ".join(shown)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    if not seconds < _MOST_S:
        return "never"
    minutes, whole = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02}h"
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{whole:02}s" if minutes else f"{whole}s"


def _moment(seconds: float | None) -> str:
    if seconds is None:
        return ""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, OSError, ValueError):  # infinite, or beyond the calendar
        return "never"

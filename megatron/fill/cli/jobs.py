"""``pipefill submit``, ``list``, ``show``, ``cancel`` and ``retry``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from megatron.fill.cli import views
from megatron.fill.cli.options import JobName, JobNames, Json, Store, opened
from megatron.fill.errors import ConfigError, JobError
from megatron.fill.pages.moving import find_standings, stillness
from megatron.fill.store import Job, JobStore
from megatron.fill.types import JobState

if TYPE_CHECKING:
    from megatron.fill.given.jobs import JobSpec

_FINISHED_SHOWN, _QUEUED_SHOWN = 10, 50
_SUBMITTED_SHOWN, _NAMED = 50, 5
_UNFINISHED = [state for state in JobState if not state.finished]
_FINISHED = [state for state in JobState if state.finished]


def submit(
    jobs_file: Annotated[Path, Argument(metavar="JOBS.yaml", help="The jobs, as --fill-jobs takes them.")],
    store: Store = None,
    user: Annotated[str | None, Option(help="Whom the jobs are counted for.  [default: you]")] = None,
    check: Annotated[
        bool, Option("--check/--no-check", help="Look whether this machine has what the jobs name.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Put the jobs of a file into the store; a job that is there already is left as it is.

    Nothing is submitted if a module, class, argument or program of a job does not exist: a separate process checks
    this, in the sandbox of jobs. Give --no-check where the jobs' modules are not installed.

    The store is created if it does not exist. --json prints a list of jobs as "show" does one, each with already_there.
    """
    from megatron.fill.given.jobs import load_jobs, submitter
    from megatron.fill.store.location import database_file, print_next

    search = list(dict.fromkeys([str(jobs_file.absolute().parent), str(Path.cwd())]))
    owner = user or submitter()
    specs = load_jobs(jobs_file)
    if not store or (file := database_file(store)) is None or file.exists():
        with opened(store, create=True):
            pass  # a wrong store is named before the jobs are looked at, which takes seconds
    if check:
        _look_at(jobs_file, specs, search)
    new = [spec.to_submit(search, owner) for spec in specs]
    with opened(store, create=True) as jobs:
        last = max((job.id for job in jobs.list(limit=1)), default=0)
        found, now_s = jobs.submit(new), jobs.now_s()
    there = [job for job in found if job.id <= last]
    if as_json:
        views.print_json([views.as_dict(job, now_s) | {"already_there": job.id <= last} for job in found])
        return
    views.print_table(found[:_SUBMITTED_SHOWN], now_s)
    if len(found) > _SUBMITTED_SHOWN:
        print(f"The first {_SUBMITTED_SHOWN} of {len(found)} jobs are shown; pipefill list --all shows all.")
    if there:
        names = ", ".join(job.name for job in there[:_NAMED]) + (", ..." if len(there) > _NAMED else "")
        print(f"Already there, and left as they are: {len(there)} of {len(found)}: {names}")
    if found:
        print_next(store, "list", f"show {found[0].name}", f"logs {found[0].name}")


def _look_at(jobs_file: Path, specs: list[JobSpec], search: list[str]) -> None:
    """Raise ConfigError, with a line for each kind of such jobs, if some cannot be loaded."""
    from megatron.fill.given.jobs import distinct
    from megatron.fill.trial.check import examine

    jobs = distinct(specs)
    try:
        examined = examine(jobs, search, {})
    except ConfigError as error:
        raise ConfigError(f"{error}; --no-check submits them unseen") from error
    pairs = zip(jobs, examined, strict=True)
    wrong = [f"{jobs_file}: job {job.name!r}: {found.error}" for job, found in pairs if found.error]
    if wrong:
        raise ConfigError("\n".join([*wrong, "nothing is submitted; --no-check submits them all the same"]))


def list_jobs(
    store: Store = None,
    state: Annotated[
        list[JobState] | None,
        Option(
            metavar="STATE",
            help=f"Only jobs in this state ({', '.join(JobState).lower()}); may be given again.",
            case_sensitive=False,
        ),
    ] = None,
    show_all: Annotated[bool, Option("--all", "-a", help="Every job.")] = False,
    as_json: Json = False,
) -> None:
    """List the jobs in the order of their submission: what runs, the first 50 that wait, the last ten that finished.

    --json prints a list of jobs as "show" does one, with all that wait.
    """
    left_out = []
    with opened(store) as jobs:
        if state or show_all:
            found = jobs.list(state or ())
        else:
            done, rest = jobs.list(_FINISHED, limit=_FINISHED_SHOWN + 1), jobs.list(_UNFINISHED)
            if len(done) > _FINISHED_SHOWN:
                left_out.append(f"the last {_FINISHED_SHOWN} of the finished jobs")
            queued = [job.id for job in rest if job.state is JobState.QUEUED]
            if len(queued) > _QUEUED_SHOWN and not as_json:
                left_out.append(f"the first {_QUEUED_SHOWN} of {len(queued)} QUEUED jobs")
                hidden = set(queued[_QUEUED_SHOWN:])
                rest = [job for job in rest if job.id not in hidden]
            found = sorted(rest + done[-_FINISHED_SHOWN:], key=lambda job: job.id)
        now_s = jobs.now_s()
    _print(found, now_s, as_json)
    if left_out and not as_json:
        print(f"Shown: {', and '.join(left_out)}. --all lists every job.")
    if not as_json and any(job.state is JobState.RUNNING for job in found):
        _say_what_stands_still(store)


def _say_what_stands_still(store: str | None) -> None:
    """Print a line for a training that hangs, if the store belongs to a run on this node: its jobs stay RUNNING."""
    from megatron.fill.store.location import database_file

    file = database_file(store) if store else None
    if file is not None:
        for line in stillness(find_standings(file.parent)):
            typer.echo(line)


def show(name: JobName, store: Store = None, as_json: Json = False) -> None:
    """Show all about one job.

    --json prints: id, name, state (LOST: its agent's lease has expired, at lost_s), cause (of the state, a fixed word
    such as timeout or training-ended; empty if unknown), reason (the same as text), user, priority, attempt, owner,
    device, directory, cancelling, asked_by (the device that it is to move to); the times submitted_s, started_s,
    finished_s, deadline_s, checkpoint_s, lease_until_s, lost_s, asked_s, ends_s (seconds since 1970); work_done,
    total_work, unit, percent, rate (per second), remaining_s, steps, harvested_s, joules, resumable, startup_s;
    failures (those after which it was tried again), result and spec. What is not known is null.
    """
    with opened(store) as jobs:
        job, now_s = jobs.find(name), jobs.now_s()
        firsts = jobs.states(job.work.after)
    if as_json:
        views.print_json(views.as_dict(job, now_s))
    else:
        views.print_job(job, now_s, firsts)


def cancel(names: JobNames, store: Store = None, as_json: Json = False) -> None:
    """Cancel jobs: waiting and lost ones at once, running ones as soon as their agent notices.

    --json prints a list of jobs as "show" does one.
    """
    _each(names, store, as_json, lambda jobs, job_id: jobs.cancel(job_id))


def retry(names: JobNames, store: Store = None, as_json: Json = False) -> None:
    """Put failed, cancelled or lost jobs back into the queue; they resume from their checkpoints.

    --json prints a list of jobs as "show" does one.
    """
    _each(names, store, as_json, lambda jobs, job_id: jobs.retry(job_id))


def _each(names: list[str], store: str | None, as_json: bool, change: Callable[[JobStore, int], Job]) -> None:
    """Change every job that can be changed; the others are named in one error at the end."""
    changed, problems = [], []
    with opened(store) as jobs:
        for name in names:
            try:
                changed.append(change(jobs, jobs.find(name).id))
            except JobError as error:
                problems.append(str(error))
        now_s = jobs.now_s()
    if changed or as_json:
        _print(changed, now_s, as_json)
    if problems:
        raise JobError("; ".join(problems))


def _print(jobs: list[Job], now_s: float, as_json: bool) -> None:
    if as_json:
        views.print_json([views.as_dict(job, now_s) for job in jobs])
    else:
        views.print_table(jobs, now_s)

"""``pipefill batch``: answers a file of requests with a language model, as one job."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron.fill import untrusted
from megatron.fill.cli import views
from megatron.fill.cli.options import Json, Store, opened
from megatron.fill.errors import ConfigError, JobError
from megatron.fill.store import Job, JobStore
from megatron.fill.types import JobState

if TYPE_CHECKING:
    from megatron.fill.llm.requests import Refused

_TASK, _ANSWERS = "megatron.fill.llm:BatchJob", "answers.jsonl"
_LOOK_S = 1.0
_REFUSED_SHOWN = 5


def batch(
    requests: Annotated[Path, typer.Argument(metavar="REQUESTS.jsonl", help="Requests in OpenAI's batch format.")],
    model: Annotated[
        Path, typer.Option(metavar="FOLDER", help="A model that transformers loads, or Megatron's checkpoints.")
    ],
    draft: Annotated[
        list[Path] | None,
        typer.Option(metavar="FOLDER", help="A small model with the same tokens; may be given again."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="[default: REQUESTS.answers.jsonl]")
    ] = None,
    tree: Annotated[
        str, typer.Option(metavar="auto|K,K,...", help="Tokens that a draft proposes below each node, by depth.")
    ] = "auto",
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help="The job's, such as 4GiB.")] = None,
    name: Annotated[
        str | None, typer.Option(metavar="JOB", help="The job's.  [default: made of the file and what is in it]")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show its progress, and end when it has ended.")] = False,
    store: Store = None,
    as_json: Json = False,
) -> None:
    """Answer a file of requests with a language model, in the bubbles of the trainings that serve the store.

    The requests are looked through first; one that is wrong gets an error for its answer. The same command again finds
    the job that is there, and writes the output once it has succeeded; a job that has failed is queued again.
    Interrupted, --watch leaves the job as it is.

    Exits with 0 if the output is there or the job still waits or runs, 1 if the job failed or was cancelled, 2 if
    something makes no sense.

    --json prints the job as "show" does, with output (null until it is there), requests and refused.
    """
    from megatron.fill.llm.requests import Refused, read_requests

    lines = read_requests(requests)
    refused = [line for line in lines if isinstance(line, Refused)]
    for folder in (model, *(draft or ())):
        if not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder: expected the folder of a model")
    args: dict[str, Any] = {"model": str(model.resolve()), "requests": str(requests.resolve()), "tree": _shape(tree)}
    if draft:
        args["draft"] = [str(folder.resolve()) for folder in draft]
    written = output or requests.with_name(f"{requests.stem}.{_ANSWERS}")
    called = name or f"{requests.stem}-{sha256(requests.read_bytes() + repr(args).encode()).hexdigest()[:8]}"
    if not as_json:
        _introduce(requests, len(lines), refused)
    with opened(store, create=True) as jobs:
        job = _found_or_new(jobs, called, args, memory, written)
        if watch:
            job = _watched(jobs, job, quiet=as_json)
        now_s = jobs.now_s()
    there = job.state is JobState.SUCCEEDED
    if there:
        _copy(job, written)
    if as_json:
        counts = {"requests": len(lines), "refused": len(refused), "output": str(written) if there else None}
        views.print_json(views.as_dict(job, now_s) | counts)
    elif there:
        print(f"The answers are in {written}.")
    elif not job.state.finished:
        print(f"{job.name} is {job.state}. The same command with --watch waits for it, and writes {written}.")
    if job.state in (JobState.FAILED, JobState.CANCELLED):
        print(f"pipefill: {job.name} is {job.state}: {job.reason}", file=sys.stderr)
        raise typer.Exit(1)


def _shape(tree: str) -> list[int] | str:
    """The value of --tree.

    Raises:
        ConfigError: it is none.
    """
    parts = tree.split(",")
    if tree == "auto":
        return tree
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"--tree is {tree!r}: expected auto, or numbers of tokens by depth such as 1,1,3,1")
    return [int(part) for part in parts]


def _introduce(requests: Path, count: int, refused: Sequence[Refused]) -> None:
    print(f"{requests}: {count} requests" + (f", {len(refused)} of them wrong:" if refused else ""))
    for one in refused[:_REFUSED_SHOWN]:
        print(f"  line {one.line}: {one.message}")
    if len(refused) > _REFUSED_SHOWN:
        print(f"  and {len(refused) - _REFUSED_SHOWN} more")


def _found_or_new(jobs: JobStore, name: str, args: dict[str, Any], memory: str | None, output: Path) -> Job:
    """The latest job of this name if it does the same, else a new one.

    Raises:
        ConfigError: the output is there and not this job's, or a value is wrong.
        JobError: a job of that name does something else.
    """
    from pydantic import ValidationError

    from megatron.fill.given.jobs import JobSpec
    from megatron.fill.given.problems import explain
    from megatron.fill.store.submit import new_job, submitter

    fields = {"name": name, "task": _TASK, "args": args} | ({} if memory is None else {"memory": memory})
    try:
        new = new_job(JobSpec.model_validate(fields), [], submitter())
    except ValidationError as error:
        raise ConfigError(explain(error, JobSpec, lambda place: (f"job {name!r}", place))) from None
    known = jobs.states([name])
    if known:
        there = jobs.find(name)
        if there.work.args != new.work.args:
            raise JobError(f"job {name!r} is there and does something else: expected another --name")
        if there.state is JobState.SUCCEEDED or not there.state.finished:
            return there
        return jobs.retry(there.id)
    if output.exists():
        raise ConfigError(f"{output} is there already: expected another --output, or that you remove it")
    return jobs.submit([new])[0]


def _watched(jobs: JobStore, job: Job, quiet: bool) -> Job:
    """Wait until the job has ended, and show its progress unless it is to be quiet."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=Console(file=sys.stderr), disable=quiet) as shown:
            line = shown.add_task(job.name, total=None)
            while True:
                job = jobs.get(job.id)
                done, total = int(job.progress.work_done), job.progress.total_work
                shown.update(line, description=f"{job.name} {job.state}", completed=done, total=total)
                if job.state.finished:
                    return job
                time.sleep(_LOOK_S)
    except KeyboardInterrupt:
        print(f"{job.name} goes on without being watched; pipefill cancel {job.name} ends it.", file=sys.stderr)
        raise typer.Exit(130) from None


def _copy(job: Job, output: Path) -> None:
    """Take the answers from the job's folder.

    Raises:
        ConfigError: they are on another machine, or cannot be written here.
    """
    answers = Path(job.directory) / _ANSWERS
    try:
        partial = output.with_name(f".{output.name}.partial")
        with untrusted.open_plain(answers) as theirs, partial.open("wb") as mine:
            shutil.copyfileobj(theirs, mine)
        partial.replace(output)
    except OSError as error:
        raise ConfigError(
            f"{answers} to {output}: {error.strerror}; expected a folder that this machine sees"
        ) from error

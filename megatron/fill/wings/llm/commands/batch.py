"""``pipefill batch``: answers a file of requests with a language model, as one job."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron.fill import untrusted
from megatron.fill.cli import views
from megatron.fill.cli.options import Json, Store, check_writable, opened
from megatron.fill.console import progress
from megatron.fill.display import counted
from megatron.fill.errors import ConfigError, JobError
from megatron.fill.store import Job, JobStore
from megatron.fill.types import JobState

if TYPE_CHECKING:
    from megatron.fill.wings.llm.requests import Refused

_TASK, _ANSWERS = "megatron.fill.wings.llm:BatchJob", "answers.jsonl"
_LOOK_S = 1.0
_REFUSED_SHOWN = 5
_MOST_DEPTH, _MOST_VALUES = 32, 5_000_000  # of a line of answers


def batch(
    requests: Annotated[Path, typer.Argument(metavar="REQUESTS.jsonl", help="Requests in OpenAI's batch format.")],
    model: Annotated[
        Path, typer.Option(metavar="FOLDER", help="A model that transformers loads, or Megatron's checkpoints.")
    ],
    draft: Annotated[
        list[Path] | None,
        typer.Option(metavar="FOLDER", help="A small model with the same tokens; may be given again."),
    ] = None,
    adapter: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="A LoRA adapter of the model, as peft saves it.")
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
    alone: Annotated[
        bool, typer.Option("--alone", help="Answer it here and now, at full speed, without a training and a store.")
    ] = False,
    batch_size: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Sequences at a time; with --alone only.  [default: 8]")
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="cpu or cuda:0; with --alone only.  [default: the GPU if any]")
    ] = None,
    store: Store = None,
    as_json: Json = False,
) -> None:
    """Answer a file of requests with a language model, in the bubbles of the trainings that serve the store.

    The requests are looked through first; one that is wrong gets an error for its answer. The same command again finds
    the job that is there, and writes the output once it has succeeded; a job that has failed is queued again. Until
    then the answers that are there are in OUTPUT.partial, also when it fails. Interrupted, --watch leaves the job as it
    is.

    --alone answers on this machine's device instead. Answers are in OUTPUT.*.partial until all are there; killed or
    interrupted, the same command continues with the requests that are not answered yet.

    Exits with 0 if the output is there or the job still waits or runs, 1 if the job failed or was cancelled, 2 if
    something makes no sense, 130 if it was interrupted.

    --json prints the job as "show" does, with output (null until it is there), partial (null if it is not there),
    requests and refused; of the answers in either, answered, failed, prompt_tokens, completion_tokens and tokens_per_s
    too. With --alone it prints these only.
    """
    from megatron.fill.wings.llm.requests import Refused, read_requests

    lines = read_requests(requests)
    refused = [line for line in lines if isinstance(line, Refused)]
    for folder in (model, *(draft or ())):
        if not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder: expected the folder of a model")
    if adapter is not None and not adapter.is_dir():
        raise ConfigError(f"{adapter} is not a folder: expected the folder of an adapter")
    args: dict[str, Any] = {"model": str(model.resolve()), "requests": str(requests.resolve()), "tree": _shape(tree)}
    if adapter is not None:
        args["adapter"] = str(adapter.resolve())
    if draft:
        args["draft"] = [str(folder.resolve()) for folder in draft]
    written = output or requests.with_name(f"{requests.stem}.{_ANSWERS}")
    check_writable(output=written)
    if alone:
        for option, given in (("--watch", watch), ("--name", name is not None)):
            if given:
                raise ConfigError(f"{option} makes no sense with --alone, which has no job; expected one of the two")
        if not as_json:
            _introduce(requests, len(lines), refused)
        if batch_size is not None:
            args["batch_sizes"] = [batch_size]
        from megatron.fill.cli.options import checked_device

        _answer_alone(args, written, checked_device(device), memory, len(lines), len(refused), as_json)
        return
    for option, value in (("--batch-size", batch_size), ("--device", device)):
        if value is not None:
            raise ConfigError(f"{option} is {value}: expected --alone with it")
    called = name or f"{requests.stem}-{sha256(requests.read_bytes() + repr(args).encode()).hexdigest()[:8]}"
    if not as_json:
        _introduce(requests, len(lines), refused)
    with opened(store, create=True) as jobs:
        job, interrupted = _found_or_new(jobs, called, args, memory, written), False
        if watch:
            job, interrupted = _watched(jobs, job, quiet=as_json)
        now_s = jobs.now_s()
    there = job.state is JobState.SUCCEEDED
    taken = _take(job, written)
    figures = {} if taken is None else _figures(taken, None, job.progress.harvested_s)
    if as_json:
        places = {"output": str(taken) if there else None, "partial": None if there or taken is None else str(taken)}
        counts = {"requests": len(lines), "refused": len(refused)} | places
        views.print_json(views.as_dict(job, now_s) | counts | figures)
    elif there:
        _conclude(written, figures, "of bubble time")
    else:
        if taken is not None:
            print(f"{figures['answered'] + figures['failed']} of {len(lines)} answers are in {taken}.")
        if not job.state.finished:
            print(f"{job.name} is {job.state}. The same command with --watch waits for it, and writes {written}.")
            from megatron.fill.store.location import print_next

            print_next(store, f"show {job.name}", f"logs {job.name}")
    if job.state in (JobState.FAILED, JobState.CANCELLED):
        print(f"pipefill: {job.name} is {job.state}: {job.reason}", file=sys.stderr)
        raise typer.Exit(1)
    if interrupted:
        print(f"{job.name} goes on without being watched; pipefill cancel {job.name} ends it.", file=sys.stderr)
        raise typer.Exit(130)


def _answer_alone(
    args: dict[str, Any], output: Path, device: str, memory: str | None, count: int, refused: int, quiet: bool
) -> None:
    """Answer the file in this process, and show the progress unless ``quiet``."""
    from megatron.fill.given.quantities import parse_bytes
    from megatron.fill.wings.llm.alone import answer_alone, partial_path

    try:
        memory_bytes = None if memory is None else parse_bytes(memory)
    except ValueError as error:
        raise ConfigError(f"--memory is {memory!r}: {error}") from None
    partial = partial_path(output, args, Path(args["requests"]).read_bytes())
    try:
        with progress(quiet) as shown:
            line = shown.add_task(f"loading {Path(args['model']).name}", total=count)

            def told(answered: int, tokens: int, seconds: float) -> None:
                speed = tokens / seconds if seconds else 0.0
                shown.update(line, description=f"{tokens:,} tokens, {speed:,.0f} a second", completed=answered)

            before, tokens, seconds = answer_alone(args, output, partial, device, memory_bytes, told)
    except KeyboardInterrupt:
        print(f"What is answered is in {partial}; the same command goes on there.", file=sys.stderr)
        raise typer.Exit(130) from None
    figures = _figures(output, tokens, seconds)
    if quiet:
        counts = {"requests": count, "refused": refused, "output": str(output), "seconds": round(seconds, 3)}
        views.print_json(counts | figures)
        return
    if before:
        print(f"{before} of them were answered before.")
    _conclude(output, figures, f"in {seconds:.1f} s on {device}")


def _figures(output: Path, tokens: int | None, seconds: float) -> dict[str, Any]:
    """Return the figures of the answers that --json prints.

    Args:
        tokens: tokens generated in ``seconds``; None for the tokens of all answers.
    """
    counts = dict.fromkeys(("answered", "failed", "prompt_tokens", "completion_tokens"), 0)
    with output.open("rb") as file:
        for line in file:
            try:
                response = untrusted.parse_json(line, _MOST_DEPTH, _MOST_VALUES)["response"]
                if response["status_code"] != 200:
                    counts["failed"] += 1
                    continue
                usage = response["body"]["usage"]
                prompt, completion = int(usage["prompt_tokens"]), int(usage.get("completion_tokens", 0))
            except (ValueError, KeyError, TypeError, AttributeError):  # no answer: a job could have written anything
                continue
            counts["answered"] += 1
            counts["prompt_tokens"] += prompt
            counts["completion_tokens"] += completion
    made = counts["completion_tokens"] if tokens is None else tokens
    return counts | {"tokens_per_s": round(made / seconds, 3) if made and seconds > 0 else None}


def _conclude(output: Path, figures: dict[str, Any], where: str) -> None:
    errors = f", {figures['failed']} of them errors" if figures["failed"] else ""
    print(f"The answers are in {output}: {figures['answered'] + figures['failed']}{errors}.")
    speed = figures["tokens_per_s"]
    print(
        f"{figures['prompt_tokens']:,} tokens of prompts, {figures['completion_tokens']:,} of answers"
        + ("." if speed is None else f": {speed:,.1f} a second {where}.")
    )


def _shape(tree: str) -> list[int] | str:
    """Parse the value of --tree; ConfigError if the value is invalid."""
    parts = tree.split(",")
    if tree == "auto":
        return tree
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"--tree is {tree!r}: expected auto, or numbers of tokens by depth such as 1,1,3,1")
    return [int(part) for part in parts]


def _introduce(requests: Path, count: int, refused: Sequence[Refused]) -> None:
    print(f"{requests}: {counted(count, 'request')}" + (f", {len(refused)} of them wrong:" if refused else ""))
    for one in refused[:_REFUSED_SHOWN]:
        print(f"  line {one.line}: {one.message}")
    if len(refused) > _REFUSED_SHOWN:
        print(f"  and {len(refused) - _REFUSED_SHOWN} more")


def _found_or_new(jobs: JobStore, name: str, args: dict[str, Any], memory: str | None, output: Path) -> Job:
    """Return the latest job of this name if its work is the same (queued again if it has failed), else a new one.

    Raises:
        ConfigError: the output exists although there is no such job, or a value is wrong.
        JobError: the job of that name has other work.
    """
    from pydantic import ValidationError

    from megatron.fill.given.jobs import JobSpec, submitter
    from megatron.fill.given.problems import explain

    fields = {"name": name, "task": _TASK, "args": args} | ({} if memory is None else {"memory": memory})
    try:
        new = JobSpec.model_validate(fields).to_submit([], submitter())
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


def _watched(jobs: JobStore, job: Job, quiet: bool) -> tuple[Job, bool]:
    """Wait for the job's end, and show its progress unless ``quiet``; return the job, and True if interrupted."""
    try:
        with progress(quiet) as shown:
            line = shown.add_task(job.name, total=None)
            while True:
                job = jobs.get(job.id)
                done, total = int(job.progress.work_done), job.progress.total_work
                shown.update(line, description=f"{job.name} {job.state}", completed=done, total=total)
                if job.state.finished:
                    return job, False
                time.sleep(_LOOK_S)
    except KeyboardInterrupt:
        return job, True


def _take(job: Job, output: Path) -> Path | None:
    """Copy the answers from the job's folder, to ``output`` if it has succeeded, else to ``output.partial``.

    Returns:
        The file written, or None if there are no answers to copy yet.

    Raises:
        ConfigError: the job has succeeded, and its answers are on another machine or cannot be written here.
    """
    partial = output.with_name(f"{output.name}.partial")
    if job.state is JobState.SUCCEEDED:
        _copy(job, output)
        partial.unlink(missing_ok=True)
        return output
    if not job.directory:  # the job never began
        return None
    try:
        _copy(job, partial)
    except ConfigError as error:
        print(f"pipefill: no answers were taken: {error}", file=sys.stderr)
        return None
    return partial


def _copy(job: Job, output: Path) -> None:
    """Copy the complete lines of the answers.

    Raises:
        ConfigError: the answers are on another machine, or cannot be written here.
    """
    answers = Path(job.directory) / _ANSWERS
    try:
        copied = output.with_name(f".{output.name}.copied")
        with untrusted.open_plain(answers) as theirs, copied.open("wb") as mine:
            for line in theirs:
                if line.endswith(b"\n"):  # otherwise the job is still writing it, or was stopped in the middle
                    mine.write(line)
        copied.replace(output)
    except OSError as error:
        raise ConfigError(
            f"{answers} to {output}: {error.strerror}; expected a folder that this machine sees"
        ) from error

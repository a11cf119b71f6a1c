"""The raw records of a run as JSON files: one per rank of the main job, one per agent.

Long lists (bubbles, iterations, spans, uses) are tables: the column names once, then one short row per value.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any

from megatron.fill.errors import FillError
from megatron.fill.types import (
    BrakeEvent,
    Bubble,
    BubbleKind,
    BubbleUse,
    CycleKey,
    Iteration,
    JobRecord,
    JobState,
    RankInfo,
    RankRecord,
    Span,
    WorkerRecord,
)

RECORD_VERSION = 2


def write_rank(path: Path, record: RankRecord) -> None:
    """Write what one rank recorded; a reader sees the whole file or none."""
    content = {
        "version": RECORD_VERSION,
        "kind": "rank",
        "info": _scalars(record.info),
        "schedule": record.schedule and _scalars(record.schedule),
        "iterations": _table(Iteration, record.iterations),
        "bubbles": _table(Bubble, record.bubbles),
        "spans": _table(Span, record.spans),
        "brakes": _table(BrakeEvent, record.brakes),
    }
    _write_json(path, content)


def read_rank(path: Path) -> RankRecord:
    """Read what ``write_rank`` wrote.

    Raises:
        FillError: naming the file, if it cannot be read or is not a rank's record of this version.
    """

    def build(content: dict[str, Any]) -> RankRecord:
        return RankRecord(
            info=RankInfo(**content["info"]),
            iterations=_values(Iteration, content["iterations"]),
            bubbles=_values(Bubble, content["bubbles"], kind=BubbleKind),
            spans=_values(Span, content["spans"]),
            brakes=_values(BrakeEvent, content["brakes"]),
            schedule=content["schedule"] and CycleKey(**content["schedule"]),
        )

    return _read(path, "rank", build)


def write_agent(path: Path, workers: list[WorkerRecord], jobs: list[JobRecord]) -> None:
    """Write what one agent's workers did and how its jobs ended; a result that JSON lacks is written as text."""
    content = {
        "version": RECORD_VERSION,
        "kind": "agent",
        "workers": [
            {**_scalars(worker, but=("uses", "steps")), "uses": _table(BubbleUse, worker.uses), "steps": worker.steps}
            for worker in workers
        ],
        "jobs": [_scalars(job) for job in jobs],
    }
    _write_json(path, content)


def read_agent(path: Path) -> tuple[list[WorkerRecord], list[JobRecord]]:
    """Read what ``write_agent`` wrote: the workers and the jobs.

    Raises:
        FillError: naming the file, if it cannot be read or is not an agent's record of this version.
    """

    def build(content: dict[str, Any]) -> tuple[list[WorkerRecord], list[JobRecord]]:
        workers = [
            WorkerRecord(
                **{
                    **worker,
                    "uses": _values(BubbleUse, worker["uses"]),
                    "steps": [(start, end) for start, end in worker["steps"]],
                }
            )
            for worker in content["workers"]
        ]
        jobs = [JobRecord(**{**job, "state": JobState(job["state"])}) for job in content["jobs"]]
        return workers, jobs

    return _read(path, "agent", build)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path to write to and rename it at the end, so that no reader sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a whole file or none."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_text(path, json.dumps(content, separators=(",", ":"), default=str) + "\n")


def _read[T](path: Path, kind: str, build: Callable[[dict[str, Any]], T]) -> T:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FillError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise FillError(f"{path}: is not JSON: {error}") from error
    if not isinstance(content, dict) or content.get("kind") != kind:
        raise FillError(f"{path}: is not the record of a PipeFill {kind}")
    if content.get("version") != RECORD_VERSION:
        raise FillError(f"{path}: has version {content.get('version')!r}; this PipeFill reads {RECORD_VERSION}")
    try:
        return build(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FillError(f"{path}: is damaged: {type(error).__name__}: {error}") from error


def _names(cls: type) -> list[str]:
    return [item.name for item in fields(cls)]


def _scalars(value: Any, but: tuple[str, ...] = ()) -> dict[str, Any]:
    return {name: getattr(value, name) for name in _names(type(value)) if name not in but}


def _table(cls: type, values: Iterable[Any]) -> dict[str, Any]:
    names = _names(cls)
    return {"columns": names, "rows": list(map(attrgetter(*names), values))}


def _values[T](cls: type[T], table: dict[str, Any], **convert: Callable[[Any], Any]) -> list[T]:
    names = _names(cls)
    if table["columns"] != names:
        raise ValueError(f"the columns of {cls.__name__} are {table['columns']}, not {names}")
    converters = [(names.index(name), function) for name, function in convert.items()]
    values = []
    for row in table["rows"]:
        for at, function in converters:
            row[at] = function(row[at])
        values.append(cls(*row))
    return values

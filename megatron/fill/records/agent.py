"""An agent's record of its workers and jobs: lines for each ended attempt, and a file of the running ones."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron.fill.linux.files import replacing
from megatron.fill.records.files import append, content_of, head, line, read_lines
from megatron.fill.records.tables import Table, as_columns, extend, names_of
from megatron.fill.spec import typed
from megatron.fill.types import BubbleUse, JobRecord, WorkerRecord

type Attempts = list[tuple[JobRecord, WorkerRecord]]
RUNNING, BEHIND = ".running.jsonl", ".behind"  # suffixes of file names


class AgentFile:
    """An agent's record in a segment's folder, after ``before`` earlier ones of this rank; not thread-safe.

    ``add`` and ``show`` raise OSError if it cannot be written.
    """

    def __init__(self, folder: Path, rank: int, before: int = 0) -> None:
        self._path = folder / (f"agent{rank}-{before}.jsonl" if before else f"agent{rank}.jsonl")
        self._running = self._path.with_suffix(RUNNING)
        self._behind = self._path.with_suffix(BEHIND)

    def add(self, job: JobRecord, worker: WorkerRecord) -> None:
        """Append an attempt that has ended."""
        if self._path.exists():
            append(self._path, _lines(job, worker))
        else:
            write_agent(self._path, [(job, worker)])

    def show(self, running: Attempts) -> None:
        """Replace the file of running attempts and their progress."""
        if running:
            write_agent(self._running, running)
        else:
            self._running.unlink(missing_ok=True)

    def note(self, behind: bool) -> None:
        """Create or remove the marker of a record that lacks something; a full disk can still create an empty file."""
        with suppress(OSError):
            if behind:
                self._behind.touch()
            else:
                self._behind.unlink(missing_ok=True)


def forgets(unrecorded_ns: int, first_seq: int, older_uses: int, seq: int) -> bool:
    """True if the record of an attempt, which keeps its latest uses of bubbles, lacks harvest in bubbles up to ``seq``.

    The uses before the first recorded one, which is of the bubble ``first_seq`` (0 for none), were each in another
    bubble, so the first of them was in ``first_seq - older_uses`` or before.  ``unrecorded_ns`` is their harvest.
    """
    return unrecorded_ns > 0 and first_seq - older_uses <= seq


def attempts_text(attempts: Attempts, most_bytes: int) -> bytes | None:
    """Return the content of ``write_agent`` without steps, or even single bubbles; None if it is still too long."""
    without_steps = [(job, replace(worker, steps=())) for job, worker in attempts]
    texts = (_text(without_steps), _text([(job, replace(worker, uses=())) for job, worker in without_steps]))
    return next((text for text in texts if len(text) <= most_bytes), None)


def write_agent(path: Path, attempts: Attempts) -> None:
    """Write attempts to a new file; results that JSON cannot represent are written as text."""
    with replacing(path) as temporary:
        temporary.write_bytes(_text(attempts))


def _text(attempts: Attempts) -> bytes:
    return head("agent") + b"".join(_lines(job, worker) for job, worker in attempts)


def read_agent(path: Path, steps: bool = True) -> Attempts:
    """Read an agent's record, in the order of its lines; ``steps`` are half of the file and needed by pictures only.

    Raises:
        NothingRecorded: the file has no complete line.
        FillError: the file cannot be read, or is not an agent's record of this version.
    """
    lines = read_lines(path, "agent", but="" if steps else "steps")
    next(lines)
    found: Attempts = []
    with content_of(path):
        for content in lines:
            if "steps" in content:  # the steps of the attempt on the line before
                job, worker = found.pop()
                pairs = list(zip(content["steps"]["start_ns"], content["steps"]["end_ns"], strict=True))
                found.append((job, replace(worker, steps=pairs)))
            else:
                found.append(attempt_of(content))
    return found


def _lines(job: JobRecord, worker: WorkerRecord) -> bytes:
    content = {name: getattr(worker, name) for name in names_of(WorkerRecord) if name != "steps"}
    content |= {"uses": as_columns(BubbleUse, worker.uses)}
    steps = {"start_ns": [start for start, _ in worker.steps], "end_ns": [end for _, end in worker.steps]}
    return line({"job": asdict(job), "worker": content}) + line({"steps": steps})


def attempt_of(content: dict[str, Any]) -> tuple[JobRecord, WorkerRecord]:
    """Return the attempt of a line, without its steps."""
    worker = content["worker"]
    uses: dict[str, list[Any]] = {name: [] for name in names_of(BubbleUse)}
    extend(uses, BubbleUse, worker["uses"])
    return typed(JobRecord, content["job"]), WorkerRecord(**worker | {"uses": Table(BubbleUse, uses)})

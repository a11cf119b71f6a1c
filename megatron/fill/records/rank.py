"""What one rank of the main job saw: ``rank0.jsonl``, to which lines are added while it trains.

The rank makes the lines and a thread of its own writes them, so that a slow disk holds nobody up.  Were a record
longer than ``MOST_BYTES``, the older half of its bubbles would be replaced by their sums.  What cannot be written, on a
full disk say, is kept and tried again with what comes next.  If the file is deleted meanwhile, a new one begins.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.fill.errors import FillError
from megatron.fill.linux.files import replacing
from megatron.fill.records.files import append, head, line, note, read_lines
from megatron.fill.records.tables import Table, as_columns, extend, names_of
from megatron.fill.types import BrakeEvent, Bubble, BubbleKind, CycleKey, Iteration, RankInfo, RankRecord, Span

logger = logging.getLogger("pipefill")

MOST_BYTES = 16 << 20
_TABLES: dict[str, type] = {"iterations": Iteration, "bubbles": Bubble, "spans": Span, "brakes": BrakeEvent}
_DELETED = "deleted"  # in the folder of a segment: a rank has said that its record was
_CONVERT = {"bubbles": {"kind": BubbleKind}}

type Sums = dict[tuple[BubbleKind, bool, bool], int]  # nanoseconds by kind, filling and forward_only


def add_up(bubbles: Sequence[Bubble]) -> Sums:
    """How long they were in all."""
    sums: Sums = {}
    for bubble in bubbles:
        key = (bubble.kind, bubble.filling, bubble.forward_only)
        sums[key] = sums.get(key, 0) + bubble.duration_ns
    return sums


def as_bubbles(sums: Sums) -> list[Bubble]:
    """Sums in place of the bubbles they stand for: each with index -1, from 0, and as long as those were."""
    return [
        Bubble(0, -1, kind, 0, total_ns, filling=filling, forward_only=forward_only)
        for (kind, filling, forward_only), total_ns in sums.items()
    ]


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of the record.

    Attributes:
        table: what is in it.
        sums: of its bubbles.
        last: the number of its last iteration; 0 if it has none.
    """

    table: str
    data: bytes
    sums: Sums
    last: int = 0


def _lines(part: RankRecord) -> list[_Line]:
    """What a rank saw since it last wrote, a line for each table."""
    made = []
    for table, cls in _TABLES.items():
        values = getattr(part, table)
        if values:
            content: dict[str, Any] = {table: as_columns(cls, values)}
            if table == "iterations":
                content |= _said(part)
            sums = add_up(values) if table == "bubbles" else {}
            made.append(_Line(table, line(content), sums, values[-1].iteration if table == "iterations" else 0))
    return made


def _said(part: RankRecord) -> dict[str, Any]:
    """What is not in tables, as far as it is known: what was said last counts."""
    said = {} if part.schedule is None else {"schedule": asdict(part.schedule)}
    return said | ({"settled_after": part.settled_after} if part.settled_after else {})


def _held(lines: list[_Line], most_bytes: int) -> list[_Line]:
    """Lines that wait in memory: above so much, without spans and with sums in the place of the bubbles."""
    if sum(len(one.data) for one in lines) <= most_bytes:
        return lines
    whole = [one for one in lines if one.table not in ("bubbles", "spans")]
    return [_sums_line(one.sums for one in lines), *whole]


def _sums_line(parts: Iterable[Sums]) -> _Line:
    """One line in the place of all lines of bubbles that these are the sums of."""
    sums: Sums = {}
    for its in parts:
        for key, total_ns in its.items():
            sums[key] = sums.get(key, 0) + total_ns
    return _Line("bubbles", line({"bubbles": as_columns(Bubble, as_bubbles(sums))}), sums)


def rank_file(folder: Path, rank: int) -> Path:
    """Where the rank writes, in the folder of a segment."""
    return folder / f"rank{rank}.jsonl"


class RankWriter:
    """Adds to a rank's record from a thread of its own.

    Args:
        spans: of how many of the latest additions the spans are kept, once the record has become long.
        most_bytes: how long it may become.
    """

    def __init__(self, path: Path, info: RankInfo, spans: int = 3, most_bytes: int = MOST_BYTES) -> None:
        self._path = path
        self._info = asdict(info)
        self._written = self._lost = 0  # the last iteration that was written, and that was deleted again
        self._spans = spans
        self._most_bytes = most_bytes
        self._kept: list[tuple[str, int, Sums]] = []  # of each line: its table, its length, its bubbles' sums
        self._unwritten: list[_Line] = []
        self._waiting: queue.Queue[list[_Line] | None] = queue.Queue(1)
        self._thread = threading.Thread(target=self._run, name="records", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether it would take more now; the disk may be slow."""
        return self._waiting.empty()

    def add(self, part: RankRecord) -> None:
        """Have this written.

        Raises:
            queue.Full: it is not ready.
        """
        self._waiting.put_nowait(_lines(part))

    def close(self, rest: RankRecord, timeout_s: float) -> bool:
        """Write the rest, and wait until all is written; False if it is not, or not all of it could be."""
        try:
            for last in (_lines(rest), None):
                self._waiting.put(last, timeout=timeout_s)
        except queue.Full:
            return False
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and not self._unwritten

    def unwritten(self, most_bytes: int) -> bytes:
        """After ``close``: what of the record is in no file, with a head; without spans and single bubbles if longer.

        Nothing while the disk still holds up what it was given: that may yet be written.
        """
        if self._thread.is_alive() or not self._unwritten:
            return b""
        return self._head + b"".join(one.data for one in _held(self._unwritten, most_bytes))

    @property
    def _head(self) -> bytes:
        return head("rank", info=self._info, **({"lost_until": self._lost} if self._lost else {}))

    def _run(self) -> None:
        part: list[_Line] | None = []
        while part is not None:
            failed = bool(self._unwritten)
            try:
                self._write([*self._unwritten, *part])
                self._unwritten = []
            except OSError as error:
                self._unwritten = _held([*self._unwritten, *part], self._most_bytes)
                if not failed and self._unwritten:
                    logger.warning("%s cannot be written; this is kept and tried again: %s", self._path, error)
            part = self._waiting.get()

    def _write(self, part: list[_Line]) -> None:
        if not self._path.exists():
            self._miss()
            with replacing(self._path) as temporary:
                temporary.write_bytes(self._head)
            self._kept = []  # one that was there before has been deleted
        append(self._path, b"".join(one.data for one in part))
        self._written = max([self._written, *(one.last for one in part)])
        self._kept += [(one.table, len(one.data), one.sums) for one in part]
        length = sum(size for _, size, _ in self._kept)
        if length > self._most_bytes:
            self._shorten()
            # Iterations are all kept: where they are most of it, to try again each time would be of no use.
            self._most_bytes = max(self._most_bytes, 2 * sum(size for _, size, _ in self._kept))

    def _miss(self) -> None:
        """There is no file: where there was one, say what is lost with it, if no other rank has."""
        if self._written == self._lost:
            return
        self._lost = self._written
        folder = self._path.parent
        if note(folder, _DELETED, self._info["rank"]):
            said = f"what they said of iterations up to {self._lost} is lost, and not in the report"
            # On standard output, for a relay's log was in the run folder too.
            os.write(1, f"PipeFill: the records in {folder} have been deleted while it trains; {said}\n".encode())

    def _shorten(self) -> None:
        """Leave out old spans, and the older half of the bubbles but for their sums."""
        half = sum(size for table, size, _ in self._kept if table == "bubbles") / 2
        spans = sum(table == "spans" for table, _, _ in self._kept)
        stretches, kept, at = [], [], len(self._head)
        left_out: list[Sums] = []
        for table, size, its in self._kept:
            if table == "bubbles" and half > 0:
                half -= size
                left_out.append(its)
            elif table != "spans" or spans <= self._spans:
                stretches.append((at, size))
                kept.append((table, size, its))
            spans -= table == "spans"
            at += size
        total = _sums_line(left_out)
        source = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with replacing(self._path) as temporary, temporary.open("wb") as target:
                target.write(self._head + total.data)
                for at, size in stretches:
                    target.write(os.pread(source, size, at))
        finally:
            os.close(source)
        self._kept = [("bubbles", len(total.data), total.sums), *kept]


def write_rank(path: Path, record: RankRecord) -> None:
    """Write the whole record of one rank at once."""
    with replacing(path) as temporary:
        lines = b"".join(one.data for one in _lines(record))
        said = _said(record)
        temporary.write_bytes(head("rank", info=asdict(record.info)) + lines + (line(said) if said else b""))


def read_rank(path: Path, spans: bool = True, before: RankRecord | None = None) -> RankRecord:
    """Read what a rank has written so far.

    Args:
        spans: False to leave them out; they are half of it, and only pictures need them.
        before: what the rank wrote elsewhere before, which comes first in the result.

    Raises:
        NothingRecorded: nothing whole is in it.
        FillError: naming the file, if it cannot be read, or is not a rank's record of this version.
    """
    lines = read_lines(path, "rank", but="" if spans else "spans")
    try:
        first = next(lines)
        info, lost = RankInfo(**first["info"]), int(first.get("lost_until", 0))
        columns: dict[str, dict[str, list[Any]]] = {table: {} for table in _TABLES}
        schedule, settled = None, 0
        if before is not None:
            schedule, settled, lost = before.schedule, before.settled_after, max(lost, before.lost_until)
            for table, cls in _TABLES.items():
                extend(columns[table], cls, as_columns(cls, getattr(before, table)))
        for content in lines:
            for table, more in content.items():
                if table == "schedule":
                    schedule = CycleKey(**more)
                elif table == "settled_after":
                    settled = int(more)
                else:
                    extend(columns[table], _TABLES[table], more)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FillError(f"{path}: is damaged: {type(error).__name__}: {error}") from error
    tables: dict[str, Any] = {
        table: Table(cls, columns[table] or {name: [] for name in names_of(cls)}, _CONVERT.get(table))
        for table, cls in _TABLES.items()
    }
    return RankRecord(info=info, **tables, schedule=schedule, settled_after=settled, lost_until=lost)

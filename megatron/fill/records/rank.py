"""The record of one rank of the training: ``rank0.jsonl``, to which lines are appended while it trains.

The rank makes the lines and a thread writes them, so that a slow disk does not delay the training.  If a record grows
beyond ``MOST_BYTES``, the older half of its bubbles is replaced by their sums.  Lines that cannot be written, on a full
disk say, are kept and retried with the next ones.  If the file is deleted in the meantime, a new one is begun.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.fill.linux.files import replacing
from megatron.fill.records.files import NothingRecorded, append, content_of, head, line, note, read_lines
from megatron.fill.records.tables import Table, as_columns, extend, names_of
from megatron.fill.spec import typed
from megatron.fill.types import BrakeEvent, Bubble, BubbleKind, Iteration, RankInfo, RankRecord, Span

logger = logging.getLogger("pipefill")

MOST_BYTES = 16 << 20
_TABLES: dict[str, type] = {"iterations": Iteration, "bubbles": Bubble, "spans": Span, "brakes": BrakeEvent}
_DELETED = "deleted"  # file in a segment's folder: a rank has reported that the records were deleted
_KINDS = {str(kind): kind for kind in BubbleKind}

type Sums = Counter[tuple[BubbleKind, bool, bool]]  # nanoseconds by kind, filling and forward_only


def add_up(bubbles: Sequence[Bubble]) -> Sums:
    """Return the total duration of the bubbles in ns, by kind, filling and forward_only."""
    sums: Sums = Counter()
    for bubble in bubbles:
        sums[bubble.kind, bubble.filling, bubble.forward_only] += bubble.duration_ns
    return sums


def as_bubbles(sums: Sums) -> list[Bubble]:
    """Return one bubble for each sum: in iteration 0, with index -1, starting at 0, as long as the sum."""
    return [
        Bubble(0, -1, kind, 0, total_ns, filling=filling, forward_only=forward_only)
        for (kind, filling, forward_only), total_ns in sums.items()
    ]


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of the record, with values of one table."""

    table: str
    data: bytes
    sums: Sums  # of its bubbles
    last: int = 0  # number of its last iteration


def _lines(part: RankRecord) -> list[_Line]:
    made = []
    for table, cls in _TABLES.items():
        values = getattr(part, table)
        if values:
            content: dict[str, Any] = {table: as_columns(cls, values)}
            if table == "iterations":  # with what is known beside the tables; a reader uses the last ones
                content |= {"schedule": asdict(part.schedule)} if part.schedule else {}
                content |= {"settled_after": part.settled_after} if part.settled_after else {}
            sums = add_up(values) if table == "bubbles" else Counter()
            made.append(_Line(table, line(content), sums, values[-1].iteration if table == "iterations" else 0))
    return made


def _held(lines: list[_Line], most_bytes: int) -> list[_Line]:
    """Return the lines to keep in memory: above ``most_bytes``, without spans and with sums instead of bubbles."""
    if sum(len(one.data) for one in lines) <= most_bytes:
        return lines
    whole = [one for one in lines if one.table not in ("bubbles", "spans")]
    return [_sums_line(one.sums for one in lines), *whole]


def _sums_line(parts: Iterable[Sums]) -> _Line:
    """Return one line of bubbles with the total of these sums, in place of the lines they come from."""
    sums: Sums = Counter()
    for its in parts:
        sums.update(its)
    return _Line("bubbles", line({"bubbles": as_columns(Bubble, as_bubbles(sums))}), sums)


def rank_file(folder: Path, rank: int) -> Path:
    """Return the path of the rank's record in a segment's folder."""
    return folder / f"rank{rank}.jsonl"


class RankWriter:
    """Appends to a rank's record in a background thread, and shortens it above ``most_bytes``.

    A shortened record keeps the spans of the latest ``spans`` additions.
    """

    def __init__(self, path: Path, info: RankInfo, spans: int = 3, most_bytes: int = MOST_BYTES) -> None:
        self._path = path
        self._info = asdict(info)
        self._written = self._lost = 0  # last iterations that were written, and that were deleted afterwards
        self._spans = spans
        self._most_bytes = most_bytes
        self._kept: list[tuple[str, int, Sums]] = []  # table, length in bytes and sums of each line in the file
        self._unwritten: list[_Line] = []
        self._waiting: queue.Queue[list[_Line] | None] = queue.Queue(1)
        self._thread = threading.Thread(target=self._run, name="records", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        """True if ``add`` accepts a part now; False while a slow disk holds up an earlier one."""
        return self._waiting.empty()

    def add(self, part: RankRecord) -> None:
        """Hand a part over to the thread, without waiting; queue.Full if it is not ``ready``."""
        self._waiting.put_nowait(_lines(part))

    def close(self, rest: RankRecord, timeout_s: float) -> bool:
        """Write the rest and wait for the thread; False if it timed out or something could not be written."""
        try:
            for last in (_lines(rest), None):
                self._waiting.put(last, timeout=timeout_s)
        except queue.Full:
            return False
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and not self._unwritten

    def unwritten(self, most_bytes: int) -> bytes:
        """Return the lines that are in no file after ``close``, with a head; empty if there are none.

        Above ``most_bytes``, spans and single bubbles are left out.  While the thread still waits for the disk, nothing
        is returned: its lines may yet be written.
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
            self._kept = []  # any earlier file has been deleted
        append(self._path, b"".join(one.data for one in part))
        self._written = max([self._written, *(one.last for one in part)])
        self._kept += [(one.table, len(one.data), one.sums) for one in part]
        length = sum(size for _, size, _ in self._kept)
        if length > self._most_bytes:
            self._shorten()
            # All iterations are kept: if they are most of the record, shortening it on every write would be useless.
            self._most_bytes = max(self._most_bytes, 2 * sum(size for _, size, _ in self._kept))

    def _miss(self) -> None:
        """Note the loss if the file that is missing had been written before; the first rank to notice prints it."""
        if self._written == self._lost:
            return
        self._lost = self._written
        folder = self._path.parent
        if note(folder, _DELETED, self._info["rank"]):
            said = f"what they said of iterations up to {self._lost} is lost, and not in the report"
            # On standard output, since a relay's log was in the run folder too.
            os.write(1, f"PipeFill: the records in {folder} have been deleted while it trains; {said}\n".encode())

    def _shorten(self) -> None:
        """Rewrite the file without old spans, and with sums in place of the older half of the bubbles."""
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


def read_rank(*paths: Path, spans: bool = True) -> RankRecord:
    """Read the record of a rank as far as it is written: of one file, or of several that continue each other.

    The ``spans`` are half of a file and needed by pictures only.

    Raises:
        NothingRecorded: no file has a complete line.
        FillError: a file cannot be read, or is not a rank's record of this version.
    """
    columns: dict[str, dict[str, list[Any]]]
    columns = {table: {name: [] for name in names_of(cls)} for table, cls in _TABLES.items()}
    said: dict[str, Any] = {}
    for path in paths:
        with suppress(NothingRecorded), content_of(path):
            for content in read_lines(path, "rank", but="" if spans else "spans"):
                said |= {name: value for name, value in content.items() if name not in _TABLES}
                for table in content.keys() & _TABLES:
                    extend(columns[table], _TABLES[table], content[table])
    if not said:
        raise NothingRecorded(f"{', '.join(map(str, paths))}: no line is complete")
    with content_of(paths[-1]):
        columns["bubbles"]["kind"] = [_KINDS[kind] for kind in columns["bubbles"]["kind"]]
        tables: dict[str, Any] = {table: Table(cls, columns[table]) for table, cls in _TABLES.items()}
        record: RankRecord = typed(RankRecord, said | tables)
    return record

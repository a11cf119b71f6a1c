"""Traces: fill jobs as a CSV file.

The first line names the columns, in any order::

    arrival,kind,size,deadline,user,name,priority
    0,bert-base-inference,30m,2h,ada,embed,0
    12.5,bert-base-inference,5400,,bob,,

Attributes of the columns:

- ``arrival``: duration since the start of the trace, or a point in time (ISO 8601, UTC without a zone); the earliest
  point in time is then the start of the trace.
- ``kind``: name of a ``FillKind``.
- ``size``: duration on an otherwise idle device; times the kind's ``alone_rate`` this is the job's work.
- ``deadline``: duration since the job's arrival, or a point in time if arrivals are; empty for none.
- ``user``, ``name``, ``priority``: optional, and may be empty.

Durations are seconds, or such as ``90s``, ``30m``, ``2h`` or ``1d``.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from megatron.fill.errors import ConfigError
from megatron.fill.given.problems import shown
from megatron.fill.given.quantities import DURATION, parse_duration
from megatron.fill.wings.sim.values import FillKind, SimJob

COLUMNS = ("arrival", "kind", "size", "deadline", "user", "name", "priority")
_NEEDED = ("arrival", "kind", "size")


def load_trace(path: str | Path, kinds: Sequence[FillKind]) -> tuple[SimJob, ...]:
    """Read a trace; the jobs are numbered from 0 in the order of its lines.

    ConfigError, with file, line, field, value and the expected content, if the trace is invalid.
    """
    known = {kind.name: kind for kind in kinds}
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            reader = _Reader(str(path), known)
            jobs = tuple(reader.read(file))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise ConfigError(f"{path}: cannot be read: {reason}; expected a CSV file with a line per job") from error
    if not jobs:
        raise ConfigError(f"{path}: has no jobs; expected a line per job below {','.join(COLUMNS)}")
    if reader.dated:
        start_s = min(job.arrival_s for job in jobs)
        jobs = tuple(_moved(job, start_s) for job in jobs)
    return jobs


class _Reader:
    """Reader of a file.  ``dated`` is True if its arrivals are points in time, None before the first one."""

    def __init__(self, path: str, kinds: Mapping[str, FillKind]) -> None:
        self.dated: bool | None = None
        self._path = path
        self._kinds = kinds
        self._line = 1

    def read(self, lines: Iterator[str]) -> Iterator[SimJob]:
        rows = csv.reader(lines, strict=True)
        try:
            header = [name.strip() for name in next(rows, [])]
            self._check_header(header)
            number = 0
            for row in rows:
                self._line = rows.line_num
                if row:
                    yield self._job(number, header, row)
                    number += 1
        except csv.Error as error:
            raise ConfigError(f"{self._path}: line {rows.line_num} is not CSV: {error}") from error

    def _check_header(self, header: Sequence[str]) -> None:
        for name in _NEEDED:
            if name not in header:
                raise ConfigError(f"{self._path}: line 1: column {name!r} is missing; expected {','.join(COLUMNS)}")
        for name in header:
            if name not in COLUMNS or header.count(name) > 1:
                raise ConfigError(f"{self._path}: line 1: column {name!r}; expected each of {','.join(COLUMNS)} once")

    def _job(self, number: int, header: Sequence[str], row: Sequence[str]) -> SimJob:
        if len(row) != len(header):
            raise ConfigError(f"{self._path}: line {self._line}: {len(row)} fields; expected {len(header)}")
        fields = dict(zip(header, row, strict=True))
        name = kind = fields["kind"].strip()
        if kind not in self._kinds:
            raise self._wrong("kind", kind, f"expected one of {', '.join(self._kinds)}")
        arrival_s = self._arrival_s(fields["arrival"])
        size_s = self._seconds("size", fields["size"])
        if size_s == 0:
            raise self._wrong("size", fields["size"], "expected more than 0 seconds")
        name = fields.get("name", "").strip() or f"{kind}-{number}"
        return SimJob(
            id=number,
            name=name,
            kind=kind,
            arrival_s=arrival_s,
            work=size_s * self._kinds[kind].alone_rate,
            deadline_s=self._deadline_s(fields.get("deadline", ""), arrival_s),
            user=fields.get("user", "").strip(),
            priority=self._priority(fields.get("priority", "")),
        )

    def _arrival_s(self, text: str) -> float:
        if not self.dated:
            try:
                seconds = parse_duration(text)
            except ValueError:
                if self.dated is not None:
                    raise self._wrong("arrival", text, f"{DURATION}, as in the lines above") from None
            else:
                self.dated = False
                return seconds
        moment_s = _moment_s(text)
        if moment_s is None:
            above = "" if self.dated is None else ", as in the lines above"
            wanted = "such as 2030-01-31T18:00" if self.dated else "seconds, or such as 90s, 2h or 2030-01-31T18:00"
            raise self._wrong("arrival", text, f"expected {wanted}{above}")
        self.dated = True
        return moment_s

    def _deadline_s(self, text: str, arrival_s: float) -> float | None:
        if not text.strip():
            return None
        moment_s = _moment_s(text) if self.dated else None
        if moment_s is not None:
            return moment_s
        return arrival_s + self._seconds("deadline", text)

    def _seconds(self, field: str, text: str) -> float:
        try:
            return parse_duration(text)
        except ValueError as error:
            raise self._wrong(field, text, str(error)) from None

    def _priority(self, text: str) -> int:
        try:
            return int(text) if text.strip() else 0
        except ValueError:
            raise self._wrong("priority", text, "expected a whole number") from None

    def _wrong(self, field: str, value: str, expected: str) -> ConfigError:
        return ConfigError(f"{self._path}: line {self._line}: {field} is {shown(value)}: {expected}")


def _moment_s(text: str) -> float | None:
    """Seconds since the epoch, or None if the text is not a point in time."""
    try:
        float(text)  # 20300131 is a number of seconds
        return None
    except ValueError:
        pass
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        return None
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()


def _moved(job: SimJob, start_s: float) -> SimJob:
    deadline_s = None if job.deadline_s is None else job.deadline_s - start_s
    return replace(job, arrival_s=job.arrival_s - start_s, deadline_s=deadline_s)

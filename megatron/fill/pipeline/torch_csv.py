"""The CSV form of torch's pipelining schedules: a line per rank, an action per cell, such as ``0F1`` or ``3I0``.

Empty cells are time steps without an action, and lines may differ in length, as in what torch writes.  Collectives
(``2UNSHARD``), transfers (``1RECV_F0``) and waits for either (``0WAIT_SEND_F0``, from torch 2.15 on) are left out when
a file is read: the timeline has its own.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

from megatron.fill.errors import ConfigError
from megatron.fill.given.files import read_text
from megatron.fill.given.problems import shown
from megatron.fill.pipeline.schedule import Op, Pass, Schedule, ScheduleError

_MOST_BYTES = 10 << 20  # a million passes; more than the longest that ``pipefill schedule`` writes
_ACTION = re.compile(r"(\d{1,6})([FBIW])(\d{1,6})")
_TOGETHER = re.compile(r"\(([^;]+);([^;]+)\)OVERLAP_F_B")
_LEFT_OUT = re.compile(r"\d+(?:UNSHARD|RESHARD|(?:WAIT_)?REDUCE_GRAD|(?:RECV|(?:WAIT_)?SEND)_[FB]\d+)")
_EXPECTED = "expected such as 0F1, 1B0, 0I3, 0W3 or (0F0;1B0)OVERLAP_F_B"


def load_csv(path: Path) -> Schedule:
    """Read a schedule; ConfigError, with line, cell, and what was expected, if it is none."""
    expected = "a CSV file with a line per rank"
    try:
        lines = list(csv.reader(StringIO(read_text(path, expected, _MOST_BYTES), newline="")))
    except csv.Error as error:
        raise ConfigError(f"{path}: is not CSV: {error}; expected {expected}") from error
    while lines and not any(map(str.strip, lines[-1])):
        lines.pop()
    rows: list[list[tuple[int, Pass, int]]] = []
    cells: list[list[int]] = []
    together = set()
    for rank, line in enumerate(lines):
        rows.append([])
        cells.append([])
        for cell, text in enumerate(map(str.strip, line), 1):
            found = list(_actions(text))
            if text and not found and not _LEFT_OUT.fullmatch(text):
                raise ConfigError(f"{path}, line {rank + 1}, cell {cell}: {shown(text)} is not an action: {_EXPECTED}")
            if len(found) == 2:
                together.add((rank, len(rows[rank])))
            rows[rank] += found
            cells[rank] += [cell] * len(found)
        if not rows[rank]:
            raise ConfigError(f"{path}, line {rank + 1}: it has no pass: expected the actions of rank {rank}")
    if not rows:
        raise ConfigError(f"{path}: it is empty: expected a line per rank")
    placement = _placement(path, rows, cells)
    held = [[stage for stage, holder in enumerate(placement) if holder == rank] for rank in range(len(rows))]
    order = tuple(
        tuple(Op(kind, microbatch, held[rank].index(stage)) for stage, kind, microbatch in row)
        for rank, row in enumerate(rows)
    )
    microbatches = 1 + max(op.microbatch for row in order for op in row)
    try:
        return Schedule(path.stem, len(rows), microbatches, len(held[0]), order, tuple(placement), frozenset(together))
    except ScheduleError as error:
        if error.rank is None:
            raise ConfigError(f"{path}: {error.problem}") from error
        where = f"{path}, line {error.rank + 1}"
        problem = error.problem + (" (F1.2 is microbatch 1 on the rank's third stage)" if len(held[0]) > 1 else "")
        if error.at is not None:
            where += f", cell {cells[error.rank][error.at]}"
        else:  # a pass is missing, or the microbatch that makes it so many is wrong
            places = ((rank, at) for rank, row in enumerate(order) for at in range(len(row)))
            rank, at = max(places, key=lambda place: order[place[0]][place[1]].microbatch)
            problem += f"; the last microbatch is {microbatches - 1}, in line {rank + 1}, cell {cells[rank][at]}"
        raise ConfigError(f"{where}: {problem}") from error


def dump_csv(path: Path, schedule: Schedule) -> None:
    """Write a schedule's passes, as torch's ``_load_csv`` reads them with ``format="compute_only"``."""
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(_cells(schedule, rank) for rank in range(schedule.stages))


def _actions(text: str) -> Iterator[tuple[int, Pass, int]]:
    both = _TOGETHER.fullmatch(text)
    found = [_ACTION.fullmatch(part.strip()) for part in (both.groups() if both else (text,))]
    for match in found:
        if match and all(found):
            yield int(match[1]), Pass(match[2]), int(match[3])


def _placement(path: Path, rows: list[list[tuple[int, Pass, int]]], cells: list[list[int]]) -> list[int]:
    """The rank of each stage, each of which is on one rank, and as many on each."""
    count = len({stage for row in rows for stage, _, _ in row})
    ranks: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for (stage, _, _), cell in zip(row, cells[rank], strict=True):
            where = f"{path}, line {rank + 1}, cell {cell}: stage {stage}"
            if stage >= count:
                raise ConfigError(f"{where} is unknown: expected 0 to {count - 1}, as {count} stages are named")
            if ranks.setdefault(stage, rank) != rank:
                raise ConfigError(f"{where} is on rank {rank}: expected it on rank {ranks[stage]} only")
    for rank in range(len(rows)):
        own = sum(holder == rank for holder in ranks.values())
        if own * len(rows) != count:
            has, expected = f"rank {rank} has {own} of {count} stages", f"as many on each of the {len(rows)} ranks"
            raise ConfigError(f"{path}, line {rank + 1}: {has}: expected {expected}")
    return [ranks[stage] for stage in range(count)]


def _cells(schedule: Schedule, rank: int) -> Iterator[str]:
    actions = [f"{schedule.virtual_stage(rank, op)}{op.kind}{op.microbatch}" for op in schedule.order[rank]]
    at = 0
    while at < len(actions):
        if (rank, at) in schedule.together:
            yield f"({actions[at]};{actions[at + 1]})OVERLAP_F_B"
            at += 2
        else:
            yield actions[at]
            at += 1

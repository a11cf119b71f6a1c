"""Detection of a stalled run from outside, by the pages of its ranks on this node: which rank waits for which."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.fill.linux.tree import read_process
from megatron.fill.pages.board import BOARD_BYTES, CycleBoardReader, Pulse
from megatron.fill.pages.control import Note, read_note
from megatron.fill.pages.find import link_of, notes

_S = 1e9
_STOPPED = "Tt"  # stopped by a signal, by a debugger


@dataclass(frozen=True, slots=True)
class RankStanding:
    """A rank on this node whose note is still there: it is not done, or it died."""

    rank: int
    pid: int
    state: str  # process state, a letter of proc_pid_stat(5); empty once the process is gone
    pulse: Pulse | None  # its latest pulse; None before the first, and if the note names no board

    @property
    def gone(self) -> bool:
        return not self.state or self.state in "ZX"

    @property
    def stopped(self) -> bool:
        return bool(self.state) and self.state in _STOPPED

    def still_s(self, now_ns: int) -> float:
        """Seconds since anything moved in the rank; 0 while that is usual, or if the rank is gone."""
        return 0.0 if self.pulse is None or self.gone else self.pulse.still_s(now_ns)

    def said(self, now_ns: int) -> str:
        """The rank's state, as a line of text."""
        where = f"rank {self.rank}" + (f" (stage {self.pulse.stage})" if self.pulse is not None else "")
        if self.gone:
            return f"{where}: its process {self.pid} is gone"
        if self.stopped:
            return f"{where}: its process {self.pid} is stopped; kill -CONT {self.pid} continues it"
        if self.pulse is None:
            return f"{where}: nothing is known of it yet"
        if self.pulse.silent(now_ns):
            silent_s = (now_ns - self.pulse.looked_ns) / _S
            return f"{where}: its process {self.pid} has not even looked around for {silent_s:.0f} s"
        return f"{where}: {self.pulse.waits_for(now_ns)}"


def find_standings(run_dir: Path) -> list[RankStanding]:
    """The states of a run's ranks that have a note on this node, by rank."""
    found = [standing for path in notes(run_dir) if (standing := _standing(path)) is not None]
    return sorted(found, key=lambda standing: standing.rank)


def stillness(standings: Sequence[RankStanding], now_ns: int | None = None) -> list[str]:
    """Return lines that describe a stall: since when nothing has moved, and the state of each rank.

    While the run moves, only ranks whose process is gone or stopped have a line.
    """
    now_ns = time.monotonic_ns() if now_ns is None else now_ns
    still = [(one.still_s(now_ns), one.pulse) for one in standings if one.pulse is not None]
    longest_s, pulse = max(still, key=lambda one: one[0], default=(0.0, None))
    if pulse is None or not longest_s:
        return [one.said(now_ns) for one in standings if one.gone or one.stopped]
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() - longest_s))
    before = f", and the longest before was {pulse.longest_ns / _S:.1f} s" if pulse.longest_ns else ""
    at = f" in iteration {pulse.iteration}" if pulse.iteration else ""
    return [
        f"nothing has moved{at} since {since}, for {longest_s:.0f} s{before}:",
        *(f"  {one.said(now_ns)}" for one in standings),
    ]


def _standing(path: Path) -> RankStanding | None:
    """The state of the rank that wrote a note; None if the note is damaged or has just been removed."""
    named = re.fullmatch(r"rank(\d+)\.json", path.name)
    try:
        note = read_note(path)
    except (OSError, ValueError):
        return None
    if named is None:
        return None
    process = read_process(note.pid)
    return RankStanding(int(named[1]), note.pid, "" if process is None else process.state, _pulse(note))


def _pulse(note: Note) -> Pulse | None:
    try:
        link = None if note.board is None else link_of(note, note.board, "cycle")
        if link is None:
            return None
        fd = os.open(link, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return CycleBoardReader(fd).pulse() if os.fstat(fd).st_size >= BOARD_BYTES else None
    finally:
        os.close(fd)

"""The segments of a run: the starts of its training, each with its settings and its ending."""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import Any

from megatron.fill.errors import FillError
from megatron.fill.folders import BETWEEN, RECORDS
from megatron.fill.linux.files import replacing
from megatron.fill.linux.host import process_started_ns
from megatron.fill.records.agent import Attempts, read_agent
from megatron.fill.records.files import NothingRecorded, content_of, head, note, read_lines
from megatron.fill.records.rank import read_rank
from megatron.fill.records.unwritten import Unwritten, in_memory
from megatron.fill.spec import typed
from megatron.fill.types import Prices, Quota, RankRecord

_SEGMENT = "segment.json"
_FAILED = "failed"  # file in a segment's folder: the number of the rank that failed first
_FILE = re.compile(r"(?P<who>rank|agent)(?P<rank>\d+)(?:-\d+)?(?:(?P<running>\.running)?\.jsonl|(?P<behind>\.behind))")


class SegmentEnding(StrEnum):
    """The ending of a segment."""

    RUNNING = "running"  # it has not ended
    WELL = "by itself"
    FAILED = "failed"  # with an error of the training that a rank recorded
    CUT = "cut off"  # with nothing recorded: killed, preempted, or its machine was lost


class NoRecords(FillError):
    """A folder holds no segment."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A start of the training."""

    folder: Path  # folder of its records
    number: int  # its number, from 1
    command: str  # command line of the training
    started_s: float  # the start of rank 0's process, since the epoch
    ranks: int  # number of ranks
    jobs: tuple[str, ...] = ()  # names of the jobs in its jobs file
    store: str = ""  # the job store that it served, without passwords; empty for none
    # layers of the sandbox, by name, with the reason why a layer was missing (empty if it was not)
    sandbox: Mapping[str, str] = field(default_factory=dict)
    trace_iterations: int = 3  # number of iterations for the trace
    prices: Prices | None = None  # prices of an hour given at its start; None for none
    quota: Quota | None = None  # most that the jobs of each user might take; None for all
    warmup: int | None = None  # iterations before filling begins; None if it serves no jobs
    paired_blocks: int = 0  # iterations in a block with or without filling; 0 for no blocks
    ended_s: float | None = None  # since the epoch; None if no end was recorded
    ending: SegmentEnding = SegmentEnding.CUT

    def files(self, unwritten: Mapping[int, Unwritten] | None = None) -> dict[int, RankFiles]:
        """Return the files of each rank, ascending by rank, with records that are in no file, by rank."""
        found: dict[int, RankFiles] = {}
        for path in sorted(self.folder.glob("*")):
            match = _FILE.fullmatch(path.name)
            if match is not None:
                its = found.setdefault(int(match["rank"]), RankFiles())
                if match["behind"]:
                    its.behind = True
                else:
                    lists = {"rank": its.seen, "agent": its.running if match["running"] else its.ended}
                    lists[match["who"]].append(path)
        for rank, more in (unwritten or {}).items():
            found.setdefault(rank, RankFiles()).add(more)
        return dict(sorted(found.items()))

    def between(self) -> dict[int, RankFiles]:
        """Return the files of the agents that served jobs after its end, without a training, ascending by rank."""
        return replace(self, folder=self.folder / BETWEEN).files()

    def records(self) -> Iterator[RankRecord]:
        """Yield the ``RankFiles.record`` of each rank that left one, ascending by rank; they may be large."""
        return (record for files in self.files().values() if (record := files.record()) is not None)


@dataclass(slots=True)
class RankFiles:
    """The files of one rank in one segment."""

    seen: list[Path] = field(default_factory=list)  # the rank's record, and its continuation in memory if there is one
    ended: list[Path] = field(default_factory=list)  # its agents' records of ended attempts
    running: list[Path] = field(default_factory=list)  # its agents' files of attempts that run, or ran last
    behind: bool = False  # True if the record of an agent lacks something that it could not write

    def add(self, more: Unwritten) -> None:
        """Add records that are in no file."""
        if more.seen:
            self.seen.append(in_memory(more.seen))
        if more.ended:
            self.ended.append(in_memory(more.ended))
        self.behind = more.lost

    def record(self, spans: bool = True) -> RankRecord | None:
        """Return the rank's record (``read_rank``), with or without ``spans``; None if it left none."""
        with suppress(NothingRecorded):
            return read_rank(*self.seen, spans=spans)
        return None

    def attempts(self, steps: bool = True) -> Attempts:
        """Return the attempts on this rank (``read_agent``), those with an end in its order, then those without one."""
        ended = sorted(_read(self.ended, steps), key=lambda one: one[0].ended_s)
        known = {(job.directory, job.attempt) for job, _ in ended}
        running = self.running_attempts(steps)
        return ended + [one for one in running if (one[0].directory, one[0].attempt) not in known]

    def running_attempts(self, steps: bool = False) -> Attempts:
        """Return the attempts that run, or ran last, as they were then; ended ones may be among them."""
        return _read(self.running, steps)


def _read(paths: Iterable[Path], steps: bool) -> Attempts:
    found: Attempts = []
    for path in paths:
        with suppress(NothingRecorded):
            found += read_agent(path, steps)
    return found


class OpenSegment:
    """The segment that this process began; a lock on its file shows other processes that this one is alive."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self._write(segment)
        self._fd = os.open(segment.folder / _SEGMENT, os.O_RDONLY | os.O_CLOEXEC)
        with suppress(OSError):  # on a file system without locks it counts as cut off until it has ended
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.register_at_fork(after_in_child=self._close)  # a writer of a save would hold it on after a kill

    def end(self, ending: SegmentEnding) -> None:
        """Record the ending and unlock the segment; OSError if the file cannot be written."""
        self.segment = replace(self.segment, ended_s=time.time(), ending=ending)
        self._write(self.segment)
        self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    @staticmethod
    def _write(segment: Segment) -> None:
        content = {name: value for name, value in asdict(segment).items() if name not in ("folder", "number")}
        if segment.ended_s is None:
            del content["ending"]
        with replacing(segment.folder / _SEGMENT) as temporary:
            temporary.write_bytes(head("segment", **content))


def begin_segment(run_dir: Path, command: str, ranks: int, **more: Any) -> OpenSegment:
    """Create the next segment's folder and file; ``more`` are further attributes of ``Segment``.

    It starts with this process, as the account of its time does, and not when the imports are done.
    """
    records = run_dir / RECORDS
    records.mkdir(parents=True, exist_ok=True)
    for number in count(max(_numbers(records), default=0) + 1):
        folder = records / str(number)
        with suppress(FileExistsError):  # another training of this run, at the same time
            folder.mkdir()
            break
    started_s = time.time() - (time.monotonic_ns() - process_started_ns()) / 1e9
    return OpenSegment(Segment(folder, number, command, started_s, ranks, **more))


def note_failure(folder: Path, rank: int) -> bool:
    """Note that the training of this segment has failed; True if this rank is the first to note it.

    Any rank may: when one fails, the launcher may end rank 0 before it can record the ending.
    """
    return note(folder, _FAILED, rank)


def read_segments(run_dir: Path) -> list[Segment]:
    """Return the segments of a run, in order; NoRecords if it has none, FillError if one cannot be read."""
    records = run_dir / RECORDS
    found = [_segment(records / str(number), number) for number in sorted(_numbers(records))]
    segments = [segment for segment in found if segment is not None]
    if not segments:
        what = f"{records}: holds no records of a training" if run_dir.is_dir() else f"{run_dir}: is no folder"
        raise NoRecords(f"{what}; expected a run folder, as the training printed it")
    return segments


def last_segment(run_dir: Path) -> Segment:
    """Return the last of the ``read_segments``."""
    return read_segments(run_dir)[-1]


def _numbers(records: Path) -> list[int]:
    return [int(path.name) for path in records.glob("*") if path.name.isdecimal()]


def _segment(folder: Path, number: int) -> Segment | None:
    """Read a segment; None if it was cut off before its file was written."""
    path = folder / _SEGMENT
    if not path.exists():
        return None
    with suppress(NothingRecorded), content_of(path):
        content = next(read_lines(path, "segment"))
        if content["ended_s"] is None:
            content["ending"] = _unsaid(folder)
        segment: Segment = typed(Segment, content | {"folder": folder, "number": number})
        return segment
    return None


def _unsaid(folder: Path) -> SegmentEnding:
    """Return the ending of a segment whose rank 0 recorded none."""
    if _locked(folder / _SEGMENT):
        return SegmentEnding.RUNNING
    return SegmentEnding.FAILED if (folder / _FAILED).exists() else SegmentEnding.CUT


def _locked(path: Path) -> bool:
    """True if the segment's process is alive: it holds the lock on the file."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    else:
        return False
    finally:
        os.close(fd)

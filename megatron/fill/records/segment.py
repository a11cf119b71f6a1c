"""The segments of a run: each time that its training was started, with what was started and how it ended."""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from megatron.fill.errors import FillError
from megatron.fill.folders import RECORDS
from megatron.fill.linux.files import replacing
from megatron.fill.records.agent import Attempts, read_agent
from megatron.fill.records.files import NothingRecorded, head, note, read_lines
from megatron.fill.records.rank import read_rank
from megatron.fill.records.unwritten import Unwritten, in_memory
from megatron.fill.types import Prices, RankRecord

_SEGMENT = "segment.json"
_FAILED = "failed"  # in the folder of a segment: a rank has failed, and says which
_FILE = re.compile(r"(?P<who>rank|agent)(?P<rank>\d+)(?:-\d+)?(?:(?P<running>\.running)?\.jsonl|(?P<behind>\.behind))")


class SegmentEnding(StrEnum):
    """How a segment ended."""

    RUNNING = "running"  # it has not
    WELL = "by itself"
    FAILED = "failed"  # with an error of the training, of which a rank could tell
    CUT = "cut off"  # without a word: killed, preempted, or its machine was lost


class NoRecords(FillError):
    """A folder holds no segment."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One start of the training.

    Attributes:
        folder: of its records.
        number: from 1.
        command: the command line.
        started_s, ended_s: in seconds since the epoch; the latter None where nobody said so.
        ranks: how many there are.
        jobs: the names of those in its jobs file.
        store: the job store that it served, without passwords; empty for none.
        walls: the walls around jobs by name, and why one did not stand.
        trace_iterations: how many the trace should hold.
        prices: what it was told that an hour costs.
        warmup: how many iterations pass before it fills; None where no job is served.
        paired_blocks: how many iterations its blocks with and without filling have; 0 for no blocks.
    """

    folder: Path
    number: int
    command: str
    started_s: float
    ranks: int
    jobs: tuple[str, ...] = ()
    store: str = ""
    walls: Mapping[str, str] = field(default_factory=dict)
    trace_iterations: int = 3
    prices: Prices | None = None
    warmup: int | None = None
    paired_blocks: int = 0
    ended_s: float | None = None
    ending: SegmentEnding = SegmentEnding.CUT

    def files(self, unwritten: Mapping[int, Unwritten] | None = None) -> dict[int, RankFiles]:
        """By rank, in their order, what there is of it.

        Args:
            unwritten: what is in no file, by rank, of those of which anything is not.
        """
        found: dict[int, RankFiles] = {}
        for path in sorted(self.folder.glob("*")):
            match = _FILE.fullmatch(path.name)
            if match is not None:
                its = found.setdefault(int(match["rank"]), RankFiles())
                agents = its.behind if match["behind"] else its.running if match["running"] else its.ended
                (its.seen if match["who"] == "rank" else agents).append(path)
        for rank, more in (unwritten or {}).items():
            found.setdefault(rank, RankFiles()).add(more)
        return dict(sorted(found.items()))

    def records(self) -> Iterator[RankRecord]:
        """Of all ranks that left one, in their order; one at a time, for they may be large.

        Raises:
            FillError: one cannot be read.
        """
        for files in self.files().values():
            record = files.record()
            if record is not None:
                yield record


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The files of one rank in one segment.

    Attributes:
        seen: the rank's own; and what follows in memory.
        ended: its agents', of attempts that have ended.
        running: its agents', of those that run or ran last.
        behind: one for each agent that could not write, and so knew more than is here.
    """

    seen: list[Path] = field(default_factory=list)
    ended: list[Path] = field(default_factory=list)
    running: list[Path] = field(default_factory=list)
    behind: list[Path] = field(default_factory=list)

    def add(self, more: Unwritten) -> None:
        """Take what is in no file too."""
        if more.seen:
            self.seen.append(in_memory(more.seen))
        if more.ended:
            self.ended.append(in_memory(more.ended))
        self.behind[:] = [in_memory("")] if more.lost else []

    def record(self, spans: bool = True) -> RankRecord | None:
        """What the rank has written, with or without ``spans``; None if it left nothing.

        Raises:
            FillError: it cannot be read.
        """
        record = None
        for path in self.seen:
            with suppress(NothingRecorded):
                record = read_rank(path, spans, record)
        return record

    def attempts(self, steps: bool = True) -> Attempts:
        """What its side tasks did, in the order in which they ended, then what was not seen to end.

        Args:
            steps: False to leave them out.

        Raises:
            FillError: it cannot be read.
        """
        ended, running = ([one for path in paths for one in _read(path, steps)] for paths in (self.ended, self.running))
        ended.sort(key=lambda one: one[0].ended_s)
        known = {(job.directory, job.attempt) for job, _ in ended}
        return ended + [(job, worker) for job, worker in running if (job.directory, job.attempt) not in known]


def _read(path: Path, steps: bool) -> Attempts:
    try:
        return read_agent(path, steps)
    except NothingRecorded:
        return []


class OpenSegment:
    """The segment that this process began: it is locked as long as the process lives, so that others can tell."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self._write(segment)
        self._fd = os.open(segment.folder / _SEGMENT, os.O_RDONLY | os.O_CLOEXEC)
        with suppress(OSError):  # a file system that cannot: then it is taken for cut off until it has ended
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def end(self, ending: SegmentEnding) -> None:
        """Say how it ended.

        Raises:
            OSError: it cannot be written.
        """
        self.segment = replace(self.segment, ended_s=time.time(), ending=ending)
        self._write(self.segment)
        os.close(self._fd)

    @staticmethod
    def _write(segment: Segment) -> None:
        content = {name: value for name, value in asdict(segment).items() if name not in ("folder", "number")}
        if segment.ended_s is None:
            del content["ending"]
        with replacing(segment.folder / _SEGMENT) as temporary:
            temporary.write_bytes(head("segment", **content))


def begin_segment(
    run_dir: Path,
    command: str,
    ranks: int,
    jobs: Sequence[str] = (),
    store: str = "",
    walls: Mapping[str, str] | None = None,
    trace_iterations: int = 3,
    prices: Prices | None = None,
    warmup: int | None = None,
    paired_blocks: int = 0,
) -> OpenSegment:
    """Make the folder of a new segment, after those that are there; the arguments are those of ``Segment``.

    Raises:
        OSError: it cannot be made.
    """
    records = run_dir / RECORDS
    records.mkdir(parents=True, exist_ok=True)
    number = max(_numbers(records), default=0) + 1
    while True:
        folder = records / str(number)
        try:
            folder.mkdir()
        except FileExistsError:  # another training of this run, at the same time
            number += 1
        else:
            break
    segment = Segment(folder, number, command, time.time(), ranks, tuple(jobs), store, walls or {}, trace_iterations)
    return OpenSegment(replace(segment, prices=prices, warmup=warmup, paired_blocks=paired_blocks))


def note_failure(folder: Path, rank: int) -> bool:
    """Write down that the training of this segment has failed; whether this rank is the first to say so.

    Rank 0 may be ended by the launcher before it can say a word, because another rank has failed.
    """
    return note(folder, _FAILED, rank)


def read_segments(run_dir: Path) -> list[Segment]:
    """The segments of a run in their order.

    Raises:
        NoRecords: there is none.
        FillError: one cannot be read.
    """
    records = run_dir / RECORDS
    found = [_segment(records / str(number), number) for number in sorted(_numbers(records))]
    segments = [segment for segment in found if segment is not None]
    if not segments:
        raise NoRecords(f"{records}: holds no records of a training; expected a run folder, as the training printed it")
    return segments


def last_segment(run_dir: Path) -> Segment:
    """The last segment of a run.

    Raises:
        FillError: there is none, or one cannot be read.
    """
    return read_segments(run_dir)[-1]


def _numbers(records: Path) -> list[int]:
    return [int(path.name) for path in records.glob("*") if path.name.isdecimal()]


def _segment(folder: Path, number: int) -> Segment | None:
    """None if it was cut off before anything could be said of it."""
    path = folder / _SEGMENT
    try:
        if not path.exists():
            return None
        content = next(read_lines(path, "segment"))
        del content["version"], content["kind"]
        prices = content["prices"]
        ended = content["ended_s"] is not None
        ending = SegmentEnding(content["ending"]) if ended else _unsaid(folder)
        content |= {"folder": folder, "number": number, "ending": ending, "jobs": tuple(content["jobs"])}
        return Segment(**content | {"prices": None if prices is None else Prices(**prices)})
    except NothingRecorded:
        return None
    except (KeyError, TypeError, ValueError) as error:
        raise FillError(f"{path}: is damaged: {type(error).__name__}: {error}") from error


def _unsaid(folder: Path) -> SegmentEnding:
    """How a segment stands whose rank 0 did not say how it ended."""
    if _locked(folder / _SEGMENT):
        return SegmentEnding.RUNNING
    return SegmentEnding.FAILED if (folder / _FAILED).exists() else SegmentEnding.CUT


def _locked(path: Path) -> bool:
    """Whether its process lives."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    else:
        return False
    finally:
        os.close(fd)

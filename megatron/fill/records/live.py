"""Sums over the records of a segment, kept up to date while the training goes on, for those who watch it.

Each look reads only the lines that were added since the last one.  Everything counts from the start of the training;
only the harvest ratio leaves out the time in which jobs settle, as the report does.
"""

from __future__ import annotations

import math
import os
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from megatron.fill.errors import FillError
from megatron.fill.records.agent import Attempts, attempt_of, forgets
from megatron.fill.records.files import check
from megatron.fill.records.sampling import Sample, SampledBubble, Samples
from megatron.fill.records.segment import Segment
from megatron.fill.records.slowdown import Estimate, slowdown
from megatron.fill.records.tables import column
from megatron.fill.types import MOST_SETTLING, PIPELINE_KINDS, BrakeEvent, Iteration, JobRecord, RankInfo, WorkerRecord

_RECENT = 4096  # iterations that the slowdown is estimated from
_LONGEST_SETTLING = MOST_SETTLING + 56  # filled iterations: jobs may count as settled with the paired block after that


@dataclass(slots=True)
class _Attempt:
    """An attempt at a job, as last recorded."""

    ended: bool = False
    # numbers of the bubbles that it used, and the ns harvested in each; empty once they count whatever comes
    uses: list[tuple[int, int]] = field(default_factory=list)
    older_uses: int = 0  # number of its uses before those
    harvested_ns: int = 0  # its harvest, also in bubbles before those
    steps: int = 0
    # its harvest before jobs had settled; None if that was no longer recorded when it was first asked for
    early_ns: int | None = 0
    asked: bool = False  # True once it was
    counted: int = -1  # number of the last bubble whose overrun is in the rank's sum

    def after_ns(self, seq: int) -> int:
        """Return the ns harvested after the bubble with that number."""
        return sum(harvested_ns for at, harvested_ns in self.uses if at > seq)

    def add_early(self, settling_seq: int) -> None:
        """Count the harvest up to that bubble; what a look has seen may be in no later record."""
        if settling_seq < 0:
            return
        recorded_ns = sum(harvested_ns for _, harvested_ns in self.uses)
        first = self.uses[0][0] if self.uses else 0
        if not self.asked and forgets(self.harvested_ns - recorded_ns, first, self.older_uses, settling_seq):
            self.early_ns = None
        elif self.early_ns is not None:
            self.early_ns = max(self.early_ns, recorded_ns - self.after_ns(settling_seq))
        self.asked = True


type _Attempts = defaultdict[tuple[str, str, int], _Attempt]  # by the job's name and folder, and the attempt's number


@dataclass(slots=True)
class LiveRank:
    """The sums of one rank."""

    info: RankInfo
    iterations: int = 0
    iteration: int = 0  # number of its last iteration
    watched_ns: int = 0  # duration of the iterations whose bubbles were observed
    ended_ns: int = 0  # end of its last iteration, by the monotonic clock of its node
    seq: int = 0  # number of its last recorded bubble that a job could use; 0 for none
    # duration of the bubbles of training iterations and saves, by kind
    bubble_ns: Counter[str] = field(default_factory=Counter)
    fillable_ns: int = 0  # duration of the bubbles, of evaluations too, while filling was on
    harvested_ns: int = 0  # time inside steps in recorded bubbles; jobs are recorded more often than bubbles
    overrun_ns: int = 0
    overruns: int = 0  # number of bubbles after which a step ran on
    steps: int = 0
    brakes: list[BrakeEvent] = field(default_factory=list)
    # number of attempts that ended, by state and cause
    ended: Counter[tuple[str, str]] = field(default_factory=Counter)
    running: Attempts = field(default_factory=list)  # the attempts that run, as last recorded
    recent: deque[Iteration] = field(default_factory=lambda: deque(maxlen=_RECENT))
    settled_after: int = 0  # last iteration in which jobs of some rank set themselves up; 0 before that is known
    # duration in ns of the bubbles of each of the first filled iterations, and the number of its last
    first_filled: dict[int, tuple[int, int]] = field(default_factory=dict)
    early_ns: int | None = 0  # time in ``harvested_ns`` before jobs had settled; None if that is no longer recorded
    samples: Samples = field(default_factory=Samples)  # its sampled iterations

    @property
    def pipeline_ns(self) -> int:
        """The duration of the pipeline's bubbles in ns: without those of saves, data and groups, as in the report."""
        return sum(self.bubble_ns[kind] for kind in PIPELINE_KINDS)

    @property
    def settling(self) -> tuple[int, int]:
        """The part of ``fillable_ns`` before jobs had settled, and the number of the last bubble then; -1 for none."""
        its = [its for iteration, its in self.first_filled.items() if iteration <= self.settled_after]
        return sum(ns for ns, _ in its), max((seq for _, seq in its), default=-1)

    @property
    def harvest(self) -> tuple[int, int]:
        """The harvested and the fillable time in ns, since jobs had settled; of all time if ``early_ns`` is None."""
        if self.early_ns is None:
            return self.harvested_ns, self.fillable_ns
        return self.harvested_ns - self.early_ns, self.fillable_ns - self.settling[0]


class _Tail:
    """Reads a record line by line, as it grows; lines that begin with ``but`` are skipped."""

    def __init__(self, path: Path, but: str) -> None:
        self._path = path
        self._but = f'{{"{but}":'.encode()
        self._at: tuple[int, int] | None = None  # inode and position

    def lines(self) -> tuple[bool, Iterator[dict[str, Any]]]:
        """Return True if the file is another than before, and the lines that are new; raises OSError."""
        with self._path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            other = self._at is None or self._at[0] != inode
            file.seek(0 if other or self._at is None else self._at[1])
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._at = inode, file.tell() - len(data) + len(whole)
        texts = (text for text in whole.splitlines() if not text.startswith(self._but))
        return other, map(from_json, texts)


class _RankTail(_Tail):
    """Follows the record of one rank; a record that was shortened, or deleted, is read again."""

    def __init__(self, path: Path, sample: int) -> None:
        super().__init__(path, "spans")
        self._sample = sample
        self.rank: LiveRank | None = None

    def look(self) -> None:
        other, lines = self.lines()
        if other:
            first = next(lines, None)
            if first is None:
                return
            check(self._path, "rank", first)
            old, self.rank = self.rank, LiveRank(RankInfo(**first["info"]), samples=Samples(self._sample))
            if old is not None:  # of its jobs
                self.rank.ended, self.rank.overruns, self.rank.overrun_ns = old.ended, old.overruns, old.overrun_ns
        for content in lines:
            if self.rank is not None:
                _add(self.rank, content)


def _add(rank: LiveRank, content: dict[str, Any]) -> None:
    if its := content.get("iterations"):
        new = list(map(Iteration, *its.values()))
        rank.iterations += len(new)
        rank.watched_ns += sum(one.duration_ns for one in new if one.watched)
        rank.iteration, rank.ended_ns = new[-1].iteration, new[-1].end_ns
        rank.recent.extend(new)
        for one in new:
            if (sample := rank.samples.of(one.iteration)) is not None:
                sample.start_ns, sample.end_ns, sample.filling = one.start_ns, one.end_ns, one.filling
    rank.settled_after = content.get("settled_after", rank.settled_after)
    if its := content.get("bubbles"):
        names = ("kind", "start_ns", "end_ns", "filling", "forward_only", "iteration", "index", "seq")
        for kind, start, end, filling, forward_only, iteration, index, seq in zip(
            *(its[name] for name in names), strict=True
        ):
            rank.seq = max(rank.seq, seq)
            if not forward_only:
                rank.bubble_ns[kind] += end - start
                if index >= 0 and (sample := rank.samples.of(iteration)) is not None:
                    sample.bubbles.append(SampledBubble(kind, start, end, seq))
            if filling:
                rank.fillable_ns += end - start
                first = rank.first_filled
                # Sums of old bubbles (index -1) have no iteration.
                if index >= 0 and iteration > 0 and (iteration in first or len(first) < _LONGEST_SETTLING):
                    before_ns, before_seq = first.get(iteration, (0, -1))
                    first[iteration] = before_ns + end - start, max(before_seq, seq)
    if its := content.get("brakes"):
        rank.brakes += map(BrakeEvent, *its.values())


class LiveSegment:
    """The sums of a segment's ranks, by rank: of those on ``nodes``, or of all.

    One iteration of ``sample`` is sampled; none if that is 0.
    """

    def __init__(self, segment: Segment, nodes: Iterable[int] | None = None, sample: int = 0) -> None:
        self._segment = segment
        self._sample = sample
        self._nodes = None if nodes is None else set(nodes)
        self._tails: dict[int, _RankTail] = {}
        self._ended: dict[Path, _Tail] = {}
        self._attempts: defaultdict[int, _Attempts] = defaultdict(lambda: defaultdict(_Attempt))
        self.ranks: dict[int, LiveRank] = {}

    def look(self) -> None:
        """Read what was added since the last look; files that cannot be read now are read at the next."""
        for number, files in self._segment.files().items():
            for path in files.seen:
                self._tails.setdefault(number, _RankTail(path, self._sample))
            if (tail := self._tails.get(number)) is None:
                continue
            with suppress(OSError):
                tail.look()
            rank = tail.rank
            if rank is None or (self._nodes is not None and rank.info.node not in self._nodes):
                continue
            self.ranks[number] = rank
            attempts = self._attempts[number]
            with suppress(OSError, FillError):
                for path in files.ended:
                    _, lines = self._ended.setdefault(path, _Tail(path, "steps")).lines()
                    for job, worker in (attempt_of(content) for content in lines if "job" in content):
                        attempts[_key(job)].ended = True
                        rank.ended[job.state, job.status.cause] += 1
                        _add_attempt(rank, attempts[_key(job)], job, worker)
                running = files.running_attempts()
                rank.running = [one for one in running if not attempts[_key(one[0])].ended]
            for job, worker in rank.running:
                _add_attempt(rank, attempts[_key(job)], job, worker)
            its, (_, settling_seq) = attempts.values(), rank.settling
            settled = settling_seq >= 0 or len(rank.first_filled) >= _LONGEST_SETTLING
            for one in its:
                one.add_early(settling_seq)
                if one.ended and settled and not one.after_ns(rank.seq):
                    one.uses = []
            early = [one.early_ns for one in its if one.early_ns is not None]
            rank.early_ns = sum(early) if len(early) == len(its) else None
            rank.harvested_ns = sum(one.harvested_ns - one.after_ns(rank.seq) for one in its)
            rank.steps = sum(one.steps for one in its)

    def samples(self) -> Iterator[tuple[LiveRank, Sample]]:
        """Yield the sampled iterations that are complete and were not yielded before."""
        for rank in self.ranks.values():
            for sample in rank.samples.take(rank.iteration):
                yield rank, sample

    @property
    def bubble_share(self) -> float:
        """Bubble time of the pipeline over the time of the iterations watched, of all ranks; NaN if unknown."""
        its = self.ranks.values()
        return _ratio(sum(rank.pipeline_ns for rank in its), sum(rank.watched_ns for rank in its))

    @property
    def harvest_ratio(self) -> float:
        """Time inside steps and bubbles over fillable time, since jobs had settled, of all ranks; NaN if unknown."""
        its = [rank.harvest for rank in self.ranks.values()]
        return _ratio(sum(harvested for harvested, _ in its), sum(fillable for _, fillable in its))

    @property
    def slowdown(self) -> Estimate | None:
        """The slowdown of the training by filling, over the recent iterations; None before there are enough pairs."""
        first = next(iter(self.ranks.values()), None)  # an iteration lasts equally long on all ranks
        return slowdown(list(first.recent)) if first else None

    @property
    def jobs_done(self) -> int:
        """The number of jobs that succeeded since the training was started."""
        return sum(n for rank in self.ranks.values() for (state, _), n in rank.ended.items() if state == "SUCCEEDED")


def _key(job: JobRecord) -> tuple[str, str, int]:
    return job.name, job.directory, job.attempt


def _add_attempt(rank: LiveRank, one: _Attempt, job: JobRecord, worker: WorkerRecord) -> None:
    """Note an attempt as it is now; overruns that are new are added to the rank's."""
    one.harvested_ns, one.steps, one.older_uses = worker.harvested_ns, worker.steps_done, worker.older_uses
    seqs, harvested, overruns = (column(worker.uses, name) for name in ("seq", "harvested_ns", "overrun_ns"))
    one.uses = list(zip(seqs, harvested, strict=True))
    rank.samples.use(job.name, one.uses)
    new = [overrun_ns for seq, overrun_ns in zip(seqs, overruns, strict=True) if seq > one.counted]
    one.counted = max([*seqs, one.counted])
    rank.overrun_ns += sum(new)
    rank.overruns += sum(overrun_ns > 0 for overrun_ns in new)


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else math.nan

"""The builder of a run's report from its raw records, one rank after the other.

A worker whose rank left no record counts in no ratio, since its bubbles are unknown.  Its job is listed anyway.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

from megatron.fill.records.segment import Segment
from megatron.fill.records.unwritten import Unwritten
from megatron.fill.report.account import account, account_records, timers
from megatron.fill.report.cost import cost_of
from megatron.fill.report.cycle import bubble_cycle
from megatron.fill.report.late import late
from megatron.fill.report.part import RankPart, part_of
from megatron.fill.report.schema import (
    BrakeReport,
    JobReport,
    JobSummary,
    RankCycle,
    RankReport,
    Report,
    SandboxLayer,
    SegmentReport,
    StageReport,
    Summary,
    Totals,
)
from megatron.fill.report.seen import Seen, seen
from megatron.fill.report.slowdown import paired_slowdown, watching_slowdown
from megatron.fill.report.tally import MeanIterations, Tally
from megatron.fill.types import BrakeEvent, Iteration, JobRecord, Prices, RankInfo, RankRecord, WorkerRecord

_S, _MS = 1e9, 1e6  # nanoseconds


class Part(NamedTuple):
    """The records of a rank in a segment."""

    segment: int  # its number
    record: RankRecord
    workers: Sequence[WorkerRecord]
    unknown: str = ""  # reason why the harvest of its workers is unknown; empty if it is known


@dataclass(slots=True)
class SegmentSums:
    """Sums over the ranks of one segment that left a record."""

    infos: list[RankInfo] = field(default_factory=list)
    harvested: dict[int, int] = field(default_factory=dict)  # ns in steps inside fillable bubbles, by rank
    filled: dict[int, int] = field(default_factory=dict)  # ns of the training in iterations with filling on, by rank
    iterations: dict[int, int] = field(default_factory=dict)  # number of recorded training iterations, by rank
    numbers: list[int] = field(default_factory=list)  # numbers of the first and the last iteration of each rank
    means: MeanIterations = field(default_factory=MeanIterations)
    blocks: int = 0  # number of paired blocks
    lost_until: int = 0  # last iteration whose records were deleted, over all ranks; 0 if none were


class ReportBuilder:
    """Builds the report rank by rank, keeping only each rank's contribution."""

    def __init__(self) -> None:
        self.segments: defaultdict[int, SegmentSums] = defaultdict(SegmentSums)
        self._total = Tally()
        self._stages: dict[int, tuple[Tally, set[int]]] = {}
        self._ranks: list[RankReport] = []
        self._cycles: list[RankCycle] = []

    def add(self, parts: Iterable[Part]) -> None:
        """Add one rank: its part of each segment in which it left a record, in order."""
        tally, brakes = Tally(), list[BrakeEvent]()
        last: Seen | None = None
        why = ""
        for number, record, workers, unknown in parts:
            saw = seen(record)
            self._count(part_of(saw, workers, known=not unknown), tally, self.segments[number])
            self.segments[number].lost_until = max(self.segments[number].lost_until, record.lost_until)
            brakes += record.brakes
            why = unknown or why
            if last is None or len(saw.iterations.number):
                last = saw
        if last is not None:
            self._ranks.append(_rank(last.info, tally, brakes, why))
            self._cycles.append(bubble_cycle(last))

    def _count(self, part: RankPart, of_rank: Tally, sums: SegmentSums) -> None:
        stage, ranks = self._stages.setdefault(part.info.stage, (Tally(), set()))
        ranks.add(part.info.rank)
        for tally in (of_rank, stage, self._total):
            tally.add(part)
        sums.infos.append(part.info)
        sums.harvested[part.info.rank] = part.figures.harvested
        sums.filled[part.info.rank] = part.filled
        its = part.iterations
        sums.iterations[part.info.rank] = len(its.number)
        sums.means.add(its)
        if len(its.number):
            sums.numbers += [int(its.number.min()), int(its.number.max())]
            sums.blocks = max(sums.blocks, int(its.block.max()) + 1)

    @property
    def empty(self) -> bool:
        """True if no rank left a record."""
        return not self._ranks

    def report(
        self,
        segments: Sequence[Segment],
        jobs: Sequence[JobReport],
        prices: Prices | None = None,
        unwritten: Mapping[int, Mapping[int, Unwritten]] = {},
        between: Mapping[int, Sequence[JobRecord]] = {},
    ) -> Report:
        """Return the report of all ranks added so far, which are of these segments.

        Args:
            prices: used instead of the prices that the run was started with.
            unwritten: added records that are in no file, by segment and rank.
            between: records of the jobs after a segment, without a training, by segment.
        """
        units = {job.name: job.unit for job in jobs}
        total = _with_units(self._total.totals(), units)
        paired = self._paired()
        slowdown = paired_slowdown(paired)
        with_s = sum(fmean(sums.filled.values()) for sums in self.segments.values() if sums.filled) / _S
        summary = Summary(
            **_of(total, Summary.model_fields),
            slowdown=slowdown,
            watching=watching_slowdown(paired),
            brakes=max((len(rank.brakes) for rank in self._ranks), default=0),
            jobs=[JobSummary(**_of(job, JobSummary.model_fields)) for job in jobs],
        )
        last = segments[-1]
        records = account_records(segments)
        accounts = account(segments, records)
        return Report(
            command=last.command,
            segments=[
                self._segment(one, unwritten.get(one.number, {}), between.get(one.number, ())) for one in segments
            ],
            summary=summary,
            ranks=[_with_units(rank, units) for rank in self._ranks],
            stages=[
                _with_units(StageReport(**dict(tally.totals()), stage=stage, ranks=len(ranks)), units)
                for stage, (tally, ranks) in sorted(self._stages.items())
            ],
            total=total,
            cost=cost_of(with_s, slowdown, self._total.done, jobs, prices or last.prices, last.paired_blocks > 0),
            jobs=list(jobs),
            cycle=self._cycles,
            account=accounts,
            timers=timers(records, accounts),
            late=late(self._ranks, accounts),
            sandbox=[SandboxLayer(name=name, lacks=why) for name, why in last.sandbox.items()],
        )

    def _paired(self) -> list[Iteration]:
        """Return the iterations of all segments in paired blocks; no pair spans two segments."""
        found: list[Iteration] = []
        before = 0
        for _, sums in sorted(self.segments.items()):
            found += sums.means.iterations(before)
            before += sums.blocks + sums.blocks % 2
        return found

    def _segment(
        self, segment: Segment, unwritten: Mapping[int, Unwritten], between: Sequence[JobRecord]
    ) -> SegmentReport:
        sums = self.segments.get(segment.number, SegmentSums())
        return SegmentReport(
            **_of(segment, SegmentReport.model_fields),
            recorded=len(sums.infos),
            iterations=max(sums.iterations.values(), default=0),
            first_iteration=min(sums.numbers, default=None),
            last_iteration=max(sums.numbers, default=None),
            lost_until=sums.lost_until or None,
            unwritten=sorted(unwritten),
            cut=sorted(rank for rank, its in unwritten.items() if its.cut),
            between_s=sum(job.harvested_s for job in between),
            between_steps=sum(job.steps for job in between),
        )


def _with_units[T: Totals](totals: T, units: Mapping[str, str]) -> T:
    """Set the unit of each job's work; some units are known only after all ranks have been added."""
    work = [its.model_copy(update={"unit": units.get(its.job, "")}) for its in totals.work]
    return totals.model_copy(update={"work": work})


def _rank(info: RankInfo, tally: Tally, brakes: Sequence[BrakeEvent], unknown: str) -> RankReport:
    return RankReport(
        **dict(tally.totals()),
        **_of(info, RankReport.model_fields),
        harvest_unknown=unknown,
        brakes=[BrakeReport(**_of(its, BrakeReport.model_fields), guard_ms=its.guard_ns / _MS) for its in brakes],
    )


def _of(source: object, names: Iterable[str]) -> dict[str, Any]:
    """Return those of the named attributes that ``source`` has."""
    return {name: getattr(source, name) for name in names if hasattr(source, name)}

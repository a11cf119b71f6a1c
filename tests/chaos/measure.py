"""The cost of the faults: the training's slowdown, and the time from a fault to the next job's start."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from megatron.fill.errors import FillError
from megatron.fill.records.segment import RankFiles, read_segments
from megatron.fill.report.schema import Slowdown
from megatron.fill.report.slowdown import paired_slowdown
from megatron.fill.types import Iteration, JobRecord
from tests.chaos.campaign import Findings, Stretch

_WARM = 15  # iterations at the start of a training that are not compared
_FAULT_NS = 1_000_000_000  # assumed duration of a task's own fault


@dataclass(frozen=True, slots=True)
class Recovery:
    """The time from the end of a worker, or a fault in an agent, to the start of the next worker at that rank.

    Attributes:
        seconds: time until the start of that worker's process.
        startup_s: time from there until it called its task; None if it never did.
    """

    kind: str
    seconds: float
    startup_s: float | None


def iterations(run_dirs: Iterable[Path]) -> list[Iteration]:
    """The iterations of all trainings as recorded by the first stage, without the first 15 of each."""
    found: list[Iteration] = []
    for run_dir in run_dirs:
        try:
            # The first segment: another training in the same folder is one of the faults.
            record = read_segments(run_dir)[0].files().get(0, RankFiles()).record()
        except FillError:  # a training that failed early leaves none
            continue
        found += record.iterations[_WARM:] if record is not None else []
    return found


def slowdown(windows: Sequence[Stretch], seen: Sequence[Iteration]) -> Slowdown | None:
    """Compare each window with faults with the quiet one after it, unless its faults stand alone; None without any."""
    blocks = [
        Iteration(one.iteration, one.start_ns, one.end_ns, window.faults, number)
        for number, window in enumerate(windows)
        for one in seen
        if not any(pair.alone for pair in windows[number - number % 2 : number + 1])
        and window.start_ns <= one.start_ns
        and one.end_ns <= window.end_ns
    ]
    return paired_slowdown(_evened(blocks))


def _evened(blocks: Sequence[Iteration]) -> list[Iteration]:
    """The same number of iterations from both windows of a pair: those nearest to their boundary."""
    by_block: defaultdict[int, list[Iteration]] = defaultdict(list)
    for one in blocks:
        by_block[one.block].append(one)
    kept = []
    for number, first in by_block.items():
        second = by_block.get(number + 1, [])
        if number % 2 == 0 and second:
            kept += first[-2 * len(second) :] + second[: 2 * len(first)]
    return kept


def slowdown_by_kind(findings: Findings, seen: Sequence[Iteration]) -> dict[str, float]:
    """The slowdown of iterations that overlap a fault, by kind: a ratio minus 1.

    It is the median, over these iterations, of their duration divided by the median of the next quiet window.
    """
    ratios: defaultdict[str, list[float]] = defaultdict(list)
    quiet = [(window.start_ns, _median_ns(window, seen)) for window in findings.windows if not window.faults]
    starts = [one.start_ns for one in seen]
    ends = [one.end_ns for one in seen]
    for kind, start_ns, end_ns in stretches(findings):
        at = bisect_left(quiet, (start_ns, 0.0))
        if at == len(quiet) or not quiet[at][1]:
            continue
        for one in seen[bisect_left(ends, start_ns) : bisect_left(starts, end_ns)]:
            ratios[kind].append((one.end_ns - one.start_ns) / quiet[at][1])
    return {kind: median(values) - 1 for kind, values in ratios.items()}


def recoveries(findings: Findings) -> list[Recovery]:
    """Recoveries from the ends of workers in windows with faults, and from faults in agents.

    Only those after which another worker started at that rank in the same window: otherwise no job waited.
    """
    kinds = {job.name: job.kind.name for job in findings.jobs}
    found = []
    for segment in findings.segments:
        by_rank: defaultdict[int, list[JobRecord]] = defaultdict(list)
        for record in _jobs(segment.run_dir):
            if record.rank is not None and record.started_ns:
                by_rank[record.rank].append(record)
        for rank, records in by_rank.items():
            blows = [(record.ended_ns, kinds.get(record.name, "")) for record in records]
            blows += [(deed.start_ns, deed.kind) for deed in findings.deeds if deed.rank == rank]
            inside = [blow for blow in blows if segment.start_ns <= blow[0] <= segment.end_ns]
            found += _followed(inside, sorted(records, key=lambda one: one.started_ns), findings.windows)
    return found


def _followed(
    blows: Sequence[tuple[int, str]], records: Sequence[JobRecord], windows: Sequence[Stretch]
) -> list[Recovery]:
    starts = [record.started_ns for record in records]
    found = []
    for at_ns, kind in blows:
        end_ns = next((one.end_ns for one in windows if one.faults and one.start_ns <= at_ns <= one.end_ns), 0)
        next_one = bisect_left(starts, at_ns)
        if kind and next_one < len(records) and starts[next_one] <= end_ns:
            record = records[next_one]
            called = record.started_ns <= record.ready_ns <= record.ended_ns  # else never, or scribbled over
            startup_s = (record.ready_ns - record.started_ns) / 1e9 if called else None
            found.append(Recovery(kind, (record.started_ns - at_ns) / 1e9, startup_s))
    return found


def _jobs(run_dir: Path) -> list[JobRecord]:
    """The records of jobs that ended, from all segments of a run."""
    try:
        files = [its for segment in read_segments(run_dir) for its in segment.files().values()]
    except FillError:
        return []
    found = []
    for its in files:
        with suppress(FillError):  # cut short by a fault
            found += [job for job, _ in its.attempts() if job.ended_ns]
    return found


def _median_ns(window: Stretch, seen: Sequence[Iteration]) -> float:
    inside = [one.end_ns - one.start_ns for one in seen if window.start_ns <= one.start_ns < window.end_ns]
    return float(median(inside)) if inside else 0.0


def stretches(findings: Findings) -> Iterable[tuple[str, int, int]]:
    """Yield the kind, the start and the end of every fault, in ns."""
    for deed in findings.deeds:
        yield deed.kind, deed.start_ns, deed.end_ns
    for job in findings.jobs:
        for fault in job.faults():
            yield job.kind.name, fault.at_ns, fault.at_ns + _FAULT_NS


def blamed(findings: Findings, at_ns: int, within_s: float = 5.0) -> set[str]:
    """The kinds of the faults that began within ``within_s`` before ``at_ns``."""
    return {kind for kind, start_ns, _ in stretches(findings) if 0 <= at_ns - start_ns <= within_s * 1e9}

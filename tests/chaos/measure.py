"""What the faults cost: the main job's slowdown, and how soon the next job ran after a fault."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from megatron.fill.errors import FillError
from megatron.fill.records import RankFiles, read_segments
from megatron.fill.report import Slowdown, paired_slowdown
from megatron.fill.types import Iteration, JobRecord
from tests.chaos.campaign import Findings, Stretch

_WARM = 15  # iterations at the start of a training that are not compared
_FAULT_NS = 1_000_000_000  # how long after it began a task's own fault is held to last


@dataclass(frozen=True, slots=True)
class Recovery:
    """From the end of a worker, or a blow to an agent, to the start of the next worker at that rank.

    Attributes:
        seconds: until that worker's process was started.
        startup_s: from there until it called its task; None if it never did.
    """

    kind: str
    seconds: float
    startup_s: float | None


def iterations(run_dirs: Iterable[Path]) -> list[Iteration]:
    """The iterations of all trainings as the first stage saw them, but for those at each start."""
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
    """Each window with faults against the quiet one after it, but for those that stand alone; None if there is none."""
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
    """As many iterations in both halves of a pair: those nearest to where they meet."""
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
    """The median of the iterations that overlap a fault of the kind over that of the next quiet window, minus 1."""
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
    """Of every worker that ended in a window with faults, and of every blow to an agent, where another worker followed
    at that rank in the same window (else nothing waited)."""
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
    """Of all segments, those that ended."""
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
    """From when to when a fault of which kind lasted: its kind, its beginning and its end."""
    for deed in findings.deeds:
        yield deed.kind, deed.start_ns, deed.end_ns
    for job in findings.jobs:
        for fault in job.faults():
            yield job.kind.name, fault.at_ns, fault.at_ns + _FAULT_NS


def blamed(findings: Findings, at_ns: int, within_s: float = 5.0) -> set[str]:
    """The kinds of the faults that began shortly before something went wrong."""
    return {kind for kind, start_ns, _ in stretches(findings) if 0 <= at_ns - start_ns <= within_s * 1e9}

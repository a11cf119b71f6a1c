"""The stages that a rank waited for in its pipeline, and why: they computed, their host was late, or the transfer.

A pass takes what a pass of another stage has sent (``Schedule.sources``), so a wait before it has two parts: until the
other stage had done its part, and the transfer itself.  In the first part the other stage ran a pass (it computed), or
waited itself (then whoever it waited for counts), or did neither: its host was late, with Python between passes, a
batch, or nothing at all.  The transfer ends when the waiting rank notices it.

All is read from the records of both ranks, the bubbles and the passes of the latest iterations; nothing is measured
for it.  A stage has sent a pass's result when it opens the bubble after it, or has ended it where transfers overlap
with passes, as with several chunks per stage.  A send of gloo also waits until the other stage receives.

Stages of all pipelines are looked at together, numbered through: a collective may also wait for another pipeline's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from megatron.fill.pipeline.schedule import Schedule
from megatron.fill.pipeline.schedules import make_schedule
from megatron.fill.report.schema import Awaited
from megatron.fill.report.window import clock_shifts
from megatron.fill.types import Bubble, CycleKey, RankRecord, Span
from megatron.fill.wings.sim.recorded.parts import RecordedIteration, parts_of

_MOST_ITERATIONS = 50  # the latest ones that are looked at
_MEGATRONS = ("1f1b", "gpipe", "interleaved")  # schedules whose order of passes is known
_SLACK_NS = 1_000_000  # by which clocks of two nodes may differ after their shift
_COMPUTED, _HOST, _TRANSFER = range(3)

type Stretch = tuple[int, int]  # start and end in ns
# A stretch, the stage that was waited for, and True if that stage had still to do its part.
type _Part = tuple[int, int, int, bool]
type Sums = dict[tuple[int, int], list[int]]  # ns by cause, by the stage that waited and the one it waited for


class _Stage:
    """An iteration of one stage, on the clock of the first one; stretches in order."""

    def __init__(self, recorded: RecordedIteration, shift_ns: int) -> None:
        def shifted(them: Iterable[Span | Bubble]) -> list[Stretch]:
            return [(one.start_ns + shift_ns, one.end_ns + shift_ns) for one in them]

        self.passes = shifted(recorded.spans)
        self.waits = [shifted(its) for its in (*recorded.before, recorded.drains)]
        self.bubbles = [one for its in self.waits for one in its]
        self.parts: list[_Part] = []  # of its bubbles

    def met_ns(self, at: int, place: int) -> int | None:
        """The start of the wait at ``place`` (negative: from the end) before the pass at ``at``; None without one."""
        its = self.waits[at]
        return its[place][0] if -len(its) <= place < len(its) else None


@dataclass(frozen=True, slots=True)
class _Order:
    """The passes of a schedule in all pipelines: where each pass's input comes from, and where its output goes.

    Places are the stage and the position of a pass in it; None for the model's ends.
    """

    schedule: Schedule
    sources: list[list[tuple[int, int] | None]]
    sinks: list[list[tuple[int, int] | None]]


def waits(records: Sequence[RankRecord]) -> list[Awaited]:
    """Return whom each rank waited for in the latest iterations, those that waited longest first.

    Pipelines are left out of which a stage left no record, of other schedules than Megatron's, or of one stage.
    """
    pipelines: defaultdict[tuple[int, int, int], list[RankRecord]] = defaultdict(list)
    for record in records:
        info = record.info
        pipelines[info.data_parallel_rank, info.tensor_parallel_rank, info.context_parallel_rank].append(record)
    alike: defaultdict[tuple[CycleKey, int], list[RankRecord]] = defaultdict(list)
    for its in pipelines.values():
        its.sort(key=lambda record: record.info.stage)
        key, stages = its[0].schedule, its[0].info.stages
        if key is not None and stages > 1 and [record.info.stage for record in its] == list(range(stages)):
            alike[key, stages] += its
    found = [one for (key, stages), its in alike.items() for one in _of_pipelines(its, key, stages)]
    return sorted(found, key=lambda one: -(one.computed_s + one.host_s + one.transfer_s))


def _of_pipelines(records: Sequence[RankRecord], key: CycleKey, depth: int) -> Iterator[Awaited]:
    order = _order(key, depth, len(records) // depth)
    if order is None:
        return
    blocking = key.chunks == 1 and records[0].info.device == "cpu"
    sums: Sums = defaultdict(lambda: [0, 0, 0])
    count = 0
    for iteration in _iterations(records, order.schedule):
        if _split(iteration, order, key.chunks == 1, blocking, sums):
            count += 1
    for (stage, other), ns in sums.items():
        computed_s, host_s, transfer_s = (its / 1e9 for its in ns)
        rank, peer = records[stage].info.rank, records[other].info.rank
        yield Awaited(
            rank=rank, peer=peer, iterations=count, computed_s=computed_s, host_s=host_s, transfer_s=transfer_s
        )


@cache
def _order(key: CycleKey, stages: int, pipelines: int) -> _Order | None:
    """Return the order of this schedule's passes in that many pipelines; None if it is not known."""
    if key.schedule not in _MEGATRONS:
        return None
    try:
        schedule = make_schedule(key.schedule, stages, key.microbatches, key.chunks, key.group_size or None)
    except ValueError:  # older records lack the size of groups of microbatches
        return None
    rows = schedule.order * pipelines
    places = [(stage, at) for stage, row in enumerate(schedule.order) for at in range(len(row))]
    sources: list[list[tuple[int, int] | None]] = []
    sinks: list[list[tuple[int, int] | None]] = [[None] * len(row) for row in rows]
    for stage, numbers in enumerate(schedule.sources() * pipelines):
        first = stage - stage % stages  # of its pipeline
        made = (None if number is None else places[number] for number in numbers)
        sources.append([None if place is None else (first + place[0], place[1]) for place in made])
        for at, source in enumerate(sources[-1]):
            if source is not None:
                sinks[source[0]][source[1]] = stage, at
    return _Order(schedule, sources, sinks)


def _iterations(records: Sequence[RankRecord], schedule: Schedule) -> Iterator[list[_Stage]]:
    """Yield the latest iterations of which all stages recorded every pass, on one clock."""
    by_number = [{its.iteration: its for its in record.iterations if its.watched} for record in records]
    common = sorted(set.intersection(*map(set, by_number)))[-_MOST_ITERATIONS:]
    if not common:
        return
    shift_ns = clock_shifts(records, by_number, common)
    stages = [parts_of(record, schedule.order[record.info.stage], evaluated=True) for record in records]
    for number in common:
        if all(number in its for its in stages):
            yield [_Stage(its[number], shift_ns[record.info.rank]) for record, its in zip(records, stages, strict=True)]


def _split(stages: list[_Stage], order: _Order, posts: bool, blocking: bool, sums: Sums) -> bool:
    """Add the waits of an iteration to the sums, by stage, stage that was waited for and cause.

    Args:
        posts: a stage sends a pass's result when it opens the bubble after it, not in the background.
        blocking: a send waits until the other stage receives.

    Returns:
        False if a pass began before its input was there, so that the order of the passes was another.
    """
    for its, sources in zip(stages, order.sources, strict=True):
        for (start_ns, _), source in zip(its.passes, sources, strict=True):
            if source is not None and stages[source[0]].passes[source[1]][1] > start_ns + _SLACK_NS:
                return False
    for stage, its in enumerate(stages):
        for at, bubbles in enumerate(its.waits):
            for place, bubble in enumerate(bubbles):
                met = at == len(its.passes) and place == len(bubbles) - 1  # the last collective of the iteration
                receives = blocking and not place and not met
                due = _due(stages, order, stage, at, posts=posts, receives=receives)
                if met or (not due and at in (0, len(its.passes))):
                    counted = place - len(bubbles) if at else place
                    due = _met(stages, order.schedule.stages, stage, at, counted, bubble)
                sink = order.sinks[stage][at - 1] if at else None
                if not due and sink is not None:
                    due = [(0, sink[0])]
                its.parts += _parts(bubble, due)
    for stage, its in enumerate(stages):
        for part in its.parts:
            for cause, whom, ns in _causes(stages, part, len(stages)):
                # What the other stage waits for of this one is on its way, since this one waits.
                sums[stage, part[2] if whom == stage else whom][_TRANSFER if whom == stage else cause] += ns
    return True


def _due(
    stages: Sequence[_Stage], order: _Order, stage: int, at: int, *, posts: bool, receives: bool
) -> list[tuple[int, int]]:
    """Return when other stages had done their part in a wait before the pass at ``at``, as time in ns and stage."""
    found = []
    if at < len(order.sources[stage]) and (source := order.sources[stage][at]) is not None:
        other, made = stages[source[0]], source[1]
        sent_ns = other.met_ns(made + 1, 0) if posts else None
        found.append((other.passes[made][1] if sent_ns is None else sent_ns, source[0]))
    if receives and at and (sink := order.sinks[stage][at - 1]) is not None:
        ready_ns = stages[sink[0]].met_ns(sink[1], -1)
        found += [] if ready_ns is None else [(ready_ns, sink[0])]
    return found


def _met(
    stages: Sequence[_Stage], depth: int, stage: int, at: int, place: int, bubble: Stretch
) -> list[tuple[int, int]]:
    """Return when each other stage came to a wait in which all stages meet, such as the one for the gradients' norm.

    The waits before the first pass are counted from the first one, those after the last pass from the last one.  Stages
    of other pipelines meet there too if they came after all of this one, and before the wait ended.
    """
    found, others = [], []
    for other, theirs in enumerate(stages):
        if other != stage:
            met_ns = theirs.met_ns(len(theirs.passes) if at else 0, place)
            if other // depth != stage // depth:
                others += [] if met_ns is None else [(met_ns, other)]
            elif met_ns is not None or at:
                found.append((theirs.passes[-1][1] if met_ns is None else met_ns, other))
    start_ns, end_ns = bubble
    latest_ns = max([start_ns, *(met_ns for met_ns, _ in found)])
    return found + [one for one in others if latest_ns < one[0] <= end_ns]


def _parts(bubble: Stretch, due: Iterable[tuple[int, int]]) -> list[_Part]:
    """Return the parts of a bubble: for each stage until it had done its part, in order, and the transfer."""
    found = []
    at_ns, end_ns = bubble
    last = -1
    for due_ns, last in sorted(due):
        if at_ns < (until_ns := min(due_ns, end_ns)):
            found.append((at_ns, until_ns, last, True))
            at_ns = until_ns
    if at_ns < end_ns and last >= 0:
        found.append((at_ns, end_ns, last, False))
    return found


def _causes(stages: Sequence[_Stage], part: _Part, depth: int) -> Iterator[tuple[int, int, int]]:
    """Yield cause, stage and ns of what a stage waited for; where that stage waited too, of what it waited for."""
    start_ns, end_ns, other, working = part
    if not working or not depth:
        yield _TRANSFER, other, end_ns - start_ns
        return
    theirs = stages[other]
    computed_ns, waited_ns = (_overlap_ns(them, start_ns, end_ns) for them in (theirs.passes, theirs.bubbles))
    yield _COMPUTED, other, computed_ns
    yield _HOST, other, max(0, end_ns - start_ns - computed_ns - waited_ns)
    for a_ns, b_ns, further, still in _overlapping(theirs.parts, start_ns, end_ns):
        yield from _causes(stages, (max(a_ns, start_ns), min(b_ns, end_ns), further, still), depth - 1)


def _overlap_ns(them: Sequence[Stretch], start_ns: int, end_ns: int) -> int:
    return sum(min(b_ns, end_ns) - max(a_ns, start_ns) for a_ns, b_ns in _overlapping(them, start_ns, end_ns))


def _overlapping[T: (Stretch, _Part)](them: Sequence[T], start_ns: int, end_ns: int) -> Iterator[T]:
    for at in range(max(0, bisect_right(them, start_ns, key=lambda one: one[0]) - 1), len(them)):
        if them[at][0] >= end_ns:
            return
        if them[at][1] > start_ns:
            yield them[at]

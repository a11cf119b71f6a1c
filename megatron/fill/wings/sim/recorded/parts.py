"""Recorded iterations of a rank, split at their waits, and the durations of transfers between ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from megatron.fill.pipeline.program import Key, Program, eager
from megatron.fill.pipeline.program import rendezvous as both_wait
from megatron.fill.pipeline.schedule import Op, Pass, Schedule
from megatron.fill.types import PIPELINE_KINDS, Bubble, Iteration, RankRecord, Span


@dataclass(frozen=True, slots=True)
class RecordedIteration:
    """A recorded iteration of a rank."""

    iteration: Iteration
    spans: list[Span]
    before: list[list[Bubble]]  # waits before each pass
    drains: list[Bubble]  # waits after the last pass: for its last sends, then in the collectives across the stages

    def cut_ns(self, at: int) -> int:
        """Time at which the rank became idle before pass ``at``; the last pass's end if ``at`` is the pass count."""
        if at == len(self.spans):
            return self.spans[-1].end_ns
        return self.before[at][0].start_ns if self.before[at] else self.spans[at].start_ns


def parts_of(record: RankRecord, row: tuple[Op, ...], *, evaluated: bool = False) -> dict[int, RecordedIteration]:
    """Return a rank's iterations by number, without those that lack the span of a pass in ``row``.

    Args:
        evaluated: also those with forwards of an evaluation after these passes, which are left out.
    """
    spans: defaultdict[int, list[Span]] = defaultdict(list)
    for span in record.spans:
        spans[span.iteration].append(span)
    bubbles: defaultdict[int, list[Bubble]] = defaultdict(list)
    for bubble in record.bubbles:
        if bubble.index >= 0 and bubble.kind in PIPELINE_KINDS and not bubble.forward_only:
            bubbles[bubble.iteration].append(bubble)
    names = ["forward" if op.kind is Pass.FORWARD else "backward" for op in row]
    parts = {}
    for iteration in record.iterations:
        passes = sorted(spans[iteration.iteration], key=lambda span: span.start_ns)
        found, after = [span.name for span in passes[: len(row)]], passes[len(row) :]
        if found == names and (not after or (evaluated and all(span.name == "forward" for span in after))):
            parts[iteration.iteration] = _part(iteration, passes[: len(row)], bubbles[iteration.iteration])
    return parts


def _part(iteration: Iteration, spans: list[Span], bubbles: list[Bubble]) -> RecordedIteration:
    before: list[list[Bubble]] = [[] for _ in spans]
    drains = []
    at = 0
    for bubble in sorted(bubbles, key=lambda bubble: bubble.start_ns):
        while at < len(spans) and spans[at].start_ns < bubble.start_ns:
            at += 1
        if at < len(spans):
            before[at].append(bubble)
        else:
            drains.append(bubble)
    return RecordedIteration(iteration, spans, before, drains)


class RecordedTransfers:
    """The steps that post and await a schedule's transfers, to derive transfer times from records.

    Args:
        rendezvous: True if a send waits for its receiver.
    """

    def __init__(self, schedule: Schedule, rendezvous: bool) -> None:
        programs = both_wait(schedule) if rendezvous else eager(schedule)
        posted: defaultdict[Key, list[tuple[int, int]]] = defaultdict(list)  # transfer -> rank and step
        for program in programs:
            for key, step in [*program.sent.items(), *(program.received.items() if rendezvous else ())]:
                posted[key].append((program.rank, step))
        self._places = [_places(program) for program in programs]
        self._waits = [
            (program.rank, number, [end for key in step.transfers for end in posted[key]])
            for program in programs
            for number, step in enumerate(program.steps)
            if step.transfers
        ]

    def mean_ns(self, parts: Sequence[RecordedIteration], collectives: int) -> int:
        """Return the mean duration, once both sides were ready, of the transfers that a rank had to wait for."""
        ends = [_step_ends(part, places, collectives) for part, places in zip(parts, self._places, strict=True)]
        times = []
        for rank, number, posts in self._waits:
            waited = ends[rank].get((number, True))
            posted = [ends[other].get((step, False)) for other, step in posts]
            came = ends[rank].get((number - 1, False))
            if waited is None or came is None or None in posted:
                continue
            time_ns = max(0, waited - max(end for end in posted if end is not None))
            if came + time_ns <= waited:
                times.append(time_ns)
        return int(fmean(times)) if times else 0


@dataclass(frozen=True, slots=True)
class _Place:
    """Place of a program's step: the pass that follows, and the index of the wait there that it begins with, if any."""

    at: int
    wait: int | None
    computes: bool


def _places(program: Program) -> list[_Place]:
    places = []
    at = waits = 0
    for step in program.steps:
        places.append(_Place(at, waits if step.transfers else None, step.op is not None))
        waits += bool(step.transfers)
        if step.op is not None:
            at, waits = at + 1, 0
    return places


def _step_ends(part: RecordedIteration, places: Sequence[_Place], collectives: int) -> dict[tuple[int, bool], int]:
    """Return the end of each step's wait (True) and of the step (False), as far as the records show them."""
    bubbles = [*part.before, part.drains[:-collectives]]
    expected = Counter(place.at for place in places if place.wait is not None)
    ends: dict[tuple[int, bool], int] = {}
    for number, place in enumerate(places):
        if place.wait is not None and len(bubbles[place.at]) == expected[place.at]:
            ends[number, True] = bubbles[place.at][place.wait].end_ns
        if place.computes:
            ends[number, False] = part.cut_ns(place.at + 1)
        elif place.wait is None:
            ends[number, False] = part.cut_ns(place.at)
        elif (number, True) in ends:
            ends[number, False] = ends[number, True]
    return ends

"""Where a training's long idle time went: the part that jobs filled, and why the rest was not.

Long is what lasts 1 ms or more.  Every second counts once: bubbles by what the records say of each, and what is in no
bubble by its name in the account.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np

from megatron.fill.account import COMPUTE, EVALUATION_WAIT, LONG_NS, UNNAMED
from megatron.fill.records.account import AccountRecord, read_accounts
from megatron.fill.records.segment import last_segment
from megatron.fill.report.seen import Bubbles, seen
from megatron.fill.report.timeuse import TimeUse, time_use
from megatron.fill.types import PIPELINE_KINDS, BubbleKind, RankRecord, WorkerRecord

FILLED = "filled"
WARMUP = "warm-up"  # before the first filled iteration
PROBES = "probes"  # the brake's, and what it has stopped
START = "jobs start"  # until the jobs of all ranks have done a step
NOT_SEEN = "not seen"  # in a wait for another stage, but in no bubble of a completed iteration
_BEFORE = frozenset({"start-up", "load"})  # idle time before the first iteration
_WAITS = frozenset({*PIPELINE_KINDS, EVALUATION_WAIT})
# Kinds of bubbles outside the pipeline, and the cause that has what of their waits is in no bubble.
_OUTSIDE = {BubbleKind.SAVE: "save", BubbleKind.DATA: "data loading", BubbleKind.GROUP: "groups"}


def causes(run: Path) -> dict[str, float]:
    """Return the seconds of long idle time by cause, all ranks together, from the first iteration on.

    Args:
        run: the folder of a run of one segment.

    Raises:
        FillError: the records cannot be read.
    """
    accounts = {account.rank: account for account in read_accounts(last_segment(run).folder)}
    ranks = ((record, workers, accounts[record.info.rank]) for record, workers in _ranks(run))
    return _seconds(causes_of(*one) for one in ranks)


def causes_in(run: Path, kind: BubbleKind | None = None, start: int = 0) -> dict[str, float]:
    """Return the seconds of long bubbles by cause, as ``causes``: of one kind or all, from iteration ``start`` on."""
    return _seconds(bubble_causes(record, workers, kind, start) for record, workers in _ranks(run))


def _ranks(run: Path) -> Iterator[tuple[RankRecord, list[WorkerRecord]]]:
    for files in last_segment(run).files().values():
        record = files.record(spans=False)
        if record is not None:
            yield record, [worker for _, worker in files.attempts(steps=False)]


def _seconds(ranks: Iterable[Mapping[str, int]]) -> dict[str, float]:
    """Return the sums over ranks in seconds, the largest first."""
    found: defaultdict[str, float] = defaultdict(float)
    for its in ranks:
        for cause, ns in its.items():
            found[cause] += ns / 1e9
    return dict(sorted(found.items(), key=lambda one: -one[1]))


def causes_of(record: RankRecord, workers: Sequence[WorkerRecord], account: AccountRecord) -> dict[str, int]:
    """Return the nanoseconds of one rank's long idle time by cause."""
    bubbles = _long(record)
    found = bubble_causes(record, workers)
    for kind, name in _OUTSIDE.items():
        found[name] -= int(bubbles.duration[_is(bubbles, kind)].sum())
    in_pipeline = int(bubbles.duration[~bubbles.outside].sum())
    found[NOT_SEEN] -= in_pipeline
    for name, spent in account.spent.items():
        if name not in COMPUTE | _BEFORE | {UNNAMED}:
            found[_cause(name)] += spent.long_ns
    return {cause: ns for cause, ns in found.items() if ns > 0}


def bubble_causes(
    record: RankRecord, workers: Sequence[WorkerRecord], kind: BubbleKind | None = None, start: int = 0
) -> defaultdict[str, int]:
    """Return the nanoseconds of one rank's long bubbles by cause: of all or of one kind, from ``start`` on."""
    bubbles = _long(record)
    on = bubbles.filling | bubbles.settling
    first = int(bubbles.iteration[on].min()) if on.any() else 1 << 62
    bubbles = _those(bubbles, (bubbles.iteration >= start) & (True if kind is None else _is(bubbles, kind)))
    on = bubbles.filling | bubbles.settling
    early = bubbles.iteration < first
    found: defaultdict[str, int] = defaultdict(int)
    found[WARMUP] = int(bubbles.duration[~on & early].sum())
    found[PROBES] = int(bubbles.duration[~on & ~early].sum())
    for use, ns in time_use(_those(bubbles, bubbles.filling), workers).items():
        found[FILLED if use is TimeUse.STEPS else use.value.replace("_", " ")] += ns
    settling = _those(bubbles, bubbles.settling)
    settling.filling[:] = True
    steps_ns = time_use(settling, workers)[TimeUse.STEPS]
    found[FILLED] += steps_ns
    found[START] = int(settling.duration.sum()) - steps_ns
    return found


def _cause(name: str) -> str:
    """Return the cause for what has this name in the account and is in no bubble."""
    if name in _WAITS:
        return NOT_SEEN
    return _OUTSIDE[BubbleKind.GROUP] if "group" in name or name == "all ranks" else name


def _long(record: RankRecord) -> Bubbles:
    bubbles = seen(record).bubbles
    return _those(bubbles, bubbles.duration >= LONG_NS)


def _those(bubbles: Bubbles, chosen: np.ndarray) -> Bubbles:
    return Bubbles(*(getattr(bubbles, field.name)[chosen] for field in fields(bubbles)))


def _is(bubbles: Bubbles, kind: BubbleKind) -> np.ndarray:
    return bubbles.kind == list(BubbleKind).index(kind)

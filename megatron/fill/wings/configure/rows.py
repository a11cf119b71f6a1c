"""Rows of a result, each a layout with its best number of virtual stages, and the order of those that tie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron.fill.wings.mainjob.parallel import Parallel

if TYPE_CHECKING:
    from megatron.fill.wings.configure.search import Proposal

# Share of a GPU's room that is used by layouts that come first.  PyTorch's allocator reserves up to 9.3% more than it
# hands out (``b200_reserved`` of docs/benchmarks/configure.json), and routing gives some ranks more tokens than others.
_ROOM_USED = 0.9


def layout_of(its: Parallel) -> tuple[int, ...]:
    """Return the sizes that a row has: virtual stages, their layers and recomputation are chosen for each."""
    return its.tp, its.pp, its.dp, its.cp, its.ep, its.microbatch


def in_order(found: Sequence[Proposal], error: float, node: int) -> list[Proposal]:
    """Sort configurations: by time, but those that tie with the fastest are the safest first.

    Args:
        error: share of a time within which the order of two is not known.
        node: number of GPUs of a node.
    """
    by_time = sorted(found, key=lambda one: one.timeline.period_ns)
    ties = [one for one in by_time if one.timeline.period_ns <= (1 + error) * by_time[0].timeline.period_ns]
    return [*sorted(ties, key=lambda one: _risk(one, node)), *by_time[len(ties) :]]


def in_rows(found: Sequence[Proposal], error: float, node: int) -> list[tuple[Proposal, ...]]:
    """Put configurations into rows, in the order of ``in_order``.

    The first of a row is the one to name; the others take at most ``error`` longer than the row's fastest.
    """
    rows: dict[tuple[int, ...], list[Proposal]] = {}
    for one in in_order(found, error, node):
        rows.setdefault(layout_of(one.parallel), []).append(one)
    kept = []
    for row in rows.values():
        most_ns = (1 + error) * min(one.timeline.period_ns for one in row)
        kept.append(tuple(one for one in row if one.timeline.period_ns <= most_ns))
    return kept


def safer(one: Proposal, other: Proposal, node: int) -> str:
    """Return what puts a configuration before another that ties with it; "" for its time."""
    (full, shared), (other_full, other_shared) = (_risk(its, node) for its in (one, other))
    if full < other_full:
        return "it leaves a tenth of the room free"
    if full == other_full and shared < other_shared:
        return "more of a node's ranks have different experts, and exchange inside it"
    return ""


def _risk(one: Proposal, node: int) -> tuple[bool, float]:
    """Return the order of configurations that tie: those with little room to spare last.

    Of experts, first are those with most of a node's ranks for different ones, which hold each of them fewer times.
    Groups of several nodes count the less, the more of their exchange is between these.
    """
    ep = one.parallel.ep
    return one.peak_bytes > _ROOM_USED * one.room_bytes, -(ep if ep <= node else node * node / ep)

"""The account of the ranks' wall time over a run: compute, idle time by name, and what has no name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise

from megatron.fill.account import COMPUTE, UNNAMED, Spent
from megatron.fill.records import AccountRecord, Segment, read_accounts
from megatron.fill.report.schema import AccountReport, NamedTime

_S = 1e9  # nanoseconds
GAP = "between starts"


def account_records(segments: Sequence[Segment]) -> list[AccountRecord]:
    """Return the ``read_accounts`` of these segments."""
    return [record for segment in segments for record in read_accounts(segment.folder)]


def account(segments: Sequence[Segment], records: Sequence[AccountRecord]) -> list[AccountReport]:
    """Return the account of each rank over these segments, and that of all ranks; empty without a record."""
    parts: defaultdict[int, list[AccountRecord]] = defaultdict(list)
    for record in records:
        parts[record.rank].append(record)
    gaps_ns = sum(
        max(0, int((after.started_s - before.ended_s) * _S))
        for before, after in pairwise(segments)
        if before.ended_s is not None
    )
    gap = {GAP: Spent(gaps_ns, gaps_ns, len(segments) - 1)} if gaps_ns else {}
    ranks = [_report(rank, its, gap) for rank, its in sorted(parts.items())]
    if not ranks:
        return []
    return [*ranks, _report(None, [part for its in parts.values() for part in its], gap, len(parts))]


def _report(
    rank: int | None, parts: Sequence[AccountRecord], gap: Mapping[str, Spent], times: int = 1
) -> AccountReport:
    """Return the account of one rank, or of all with the ``gap`` between segments so many ``times``."""
    sums: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for spent in [*(part.spent for part in parts), *[gap] * times]:
        for name, one in spent.items():
            sums[name][0] += one.ns
            sums[name][1] += one.long_ns
    wall_ns = max(1, sum(part.wall_ns for part in parts) + times * sum(one.ns for one in gap.values()))
    named_ns = sum(ns for name, (ns, _) in sums.items() if name != UNNAMED)
    idle = [values for name, values in sums.items() if name not in COMPUTE and name != UNNAMED]
    return AccountReport(
        rank=rank,
        stage=None if rank is None else parts[-1].stage,
        wall_s=wall_ns / _S,
        named_share=named_ns / wall_ns,
        idle_share=sum(ns for ns, _ in idle) / wall_ns,
        long_idle_s=sum(long_ns for _, long_ns in idle) / _S,
        blind=all(part.blind for part in parts),
        times=[
            NamedTime(name=name, compute=name in COMPUTE, time_s=ns / _S, share=ns / wall_ns, long_s=long_ns / _S)
            for name, (ns, long_ns) in sorted(sums.items(), key=lambda one: -one[1][0])
        ],
    )

"""The account of the ranks' wall time over a run (compute, idle time by name, and what has no name), and Megatron's own
timers beside it: what both measure, and by how much they differ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise

from megatron.fill.account import COMPUTE, UNNAMED, Spent
from megatron.fill.records.account import AccountRecord, read_accounts
from megatron.fill.records.segment import Segment
from megatron.fill.report.schema import AccountReport, NamedTime, TimerReport

_S = 1e9  # nanoseconds
GAP = "between starts"
_BUBBLES = ("fill", "fwd-bwd", "interior")
_TRANSFERS = (
    *(f"forward-{what}" for what in ("send", "recv", "send-backward-recv", "send-forward-recv")),
    *(f"backward-{what}" for what in ("send", "recv", "send-forward-recv", "send-backward-recv")),
    "forward-backward-send-forward-backward-recv",
)
_GROUPS = ("tensor group", "context group", "expert group")  # of collectives inside passes; not said is of which
_PASSES = ("forward-compute", "backward-compute")
# Timers that are compared together, and the account's names for the same time.
_PAIRS = (
    (("forward-backward",), ("forward", "data loading", "backward", "gradients", *_GROUPS, *_BUBBLES)),
    (_PASSES, ("forward", "data loading", "backward", *_GROUPS)),
    (("forward-compute",), ("forward", "data loading")),
    (("backward-compute",), ("backward",)),
    (_TRANSFERS, _BUBBLES),
    (("all-grads-sync", "params-all-gather"), ("data group",)),
    (("optimizer",), ("optimizer",)),
    (("evaluate",), ("evaluation", "evaluation wait")),
    (("save-checkpoint", "save-checkpoint-non-persistent"), ("save",)),
    (("load-checkpoint",), ("load",)),
)


def account_records(segments: Sequence[Segment]) -> list[AccountRecord]:
    """Return the ``read_accounts`` of these segments."""
    return [record for segment in segments for record in read_accounts(segment.folder)]


def account(segments: Sequence[Segment], records: Sequence[AccountRecord]) -> list[AccountReport]:
    """Return the account of each rank over these segments, and that of all ranks; empty without a record."""
    parts: defaultdict[int, list[AccountRecord]] = defaultdict(list)
    for record in records:
        parts[record.rank].append(record)
    ended = [(before.ended_s, after.started_s) for before, after in pairwise(segments) if before.ended_s is not None]
    gaps_ns = sum(max(0, int((started_s - ended_s) * _S)) for ended_s, started_s in ended)
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
        host_late_s=sum(part.host_late_ns for part in parts) / _S,
        times=[
            NamedTime(name=name, compute=name in COMPUTE, time_s=ns / _S, share=ns / wall_ns, long_s=long_ns / _S)
            for name, (ns, long_ns) in sorted(sums.items(), key=lambda one: -one[1][0])
        ],
    )


def timers(records: Sequence[AccountRecord], accounts: Sequence[AccountReport]) -> list[TimerReport]:
    """Return Megatron's timers over all ranks and segments; ``accounts`` are those of these records."""
    sums: defaultdict[str, float] = defaultdict(float)
    for record in records:
        for name, time_s in record.timers.items():
            sums[name] += time_s
    return compared(sums, {one.name: one.time_s for one in accounts[-1].times} if accounts else {})


def compared(timers_s: Mapping[str, float], account_s: Mapping[str, float]) -> list[TimerReport]:
    """Return the timers, those first that the account has too; times are seconds by name."""
    found = []
    left = dict(timers_s)
    for together, rows in _PAIRS:
        if together is _PASSES and account_s.keys().isdisjoint(_GROUPS):
            continue  # each pass has a row of its own
        names = [name for name in together if name in left]
        there = [row for row in rows if row in account_s]
        if names and there:
            time_s, its_s = sum(left.pop(name) for name in names), sum(account_s[row] for row in there)
            both = TimerReport(timers=names, time_s=time_s, rows=there, account_s=its_s, difference_s=its_s - time_s)
            found.append(both)
    return found + [TimerReport(timers=[name], time_s=time_s) for name, time_s in left.items()]

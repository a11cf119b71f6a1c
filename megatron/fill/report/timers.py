"""Megatron's own timers beside the account: what both measure, and by how much they differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from megatron.fill.records import AccountRecord
from megatron.fill.report.schema import AccountReport, TimerReport

_BUBBLES = ("fill", "fwd-bwd", "interior")
_TRANSFERS = (
    *(f"forward-{what}" for what in ("send", "recv", "send-backward-recv", "send-forward-recv")),
    *(f"backward-{what}" for what in ("send", "recv", "send-forward-recv", "send-backward-recv")),
    "forward-backward-send-forward-backward-recv",
)
# Timers that are compared together, and the account's names for the same time.
_PAIRS = (
    (("forward-backward",), ("forward", "data loading", "backward", "gradients", *_BUBBLES)),
    (("forward-compute",), ("forward", "data loading")),
    (("backward-compute",), ("backward",)),
    (_TRANSFERS, _BUBBLES),
    (("all-grads-sync", "params-all-gather"), ("data group",)),
    (("optimizer",), ("optimizer",)),
    (("evaluate",), ("evaluation", "evaluation wait")),
    (("save-checkpoint", "save-checkpoint-non-persistent"), ("save",)),
    (("load-checkpoint",), ("load",)),
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
        names = [name for name in together if name in left]
        there = [row for row in rows if row in account_s]
        if names and there:
            time_s, its_s = sum(left.pop(name) for name in names), sum(account_s[row] for row in there)
            found.append(
                TimerReport(timers=names, time_s=time_s, rows=there, account_s=its_s, difference_s=its_s - time_s)
            )
    return found + [TimerReport(timers=[name], time_s=time_s) for name, time_s in left.items()]

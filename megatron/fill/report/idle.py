"""The account of the ranks' time on a terminal, and Megatron's own timers beside it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise

from rich.console import Console
from rich.table import Table

from megatron.fill.display import counted
from megatron.fill.records.account import BLIND
from megatron.fill.report.account import GAP
from megatron.fill.report.rows import listed, new_table
from megatron.fill.report.schema import AccountReport, Awaited, Late, TimerReport
from megatron.fill.types import PIPELINE_KINDS

_LATE, _RANKS = 5, 4  # numbers of waits for late ranks that are printed, and of ranks in each
_WAITS, _LEAST_WAIT = 20, 0.02  # number of printed pairs of ranks, and the least share of all waits that is printed
_LEAST_LATE = 0.01  # of the wall time; a host that is late for less is not named
_TIMERS = 2  # names of timers in a row
_BUBBLES = ("--fill-jobs",)
_REDUCE, _REPLICAS = "--overlap-grad-reduce", "data group"
_EXPERTS, _DISPATCHER = "--overlap-moe-expert-parallel-comm", "--moe-token-dispatcher-type"
_TENSOR = "--tp-comm-overlap"
_SAVES, _SAVER = "--async-save", "--use-persistent-ckpt-worker"
# What makes a kind of idle time shorter, or fills it: a flag, or in words what to do with one that may have a value.
_REMEDIES: dict[str, tuple[str, ...]] = {
    **{str(kind): _BUBBLES for kind in PIPELINE_KINDS},
    "drain": (*_BUBBLES, _REDUCE),
    "tensor group": (_TENSOR,),
    _REPLICAS: (_REDUCE, "--overlap-param-gather"),
    "expert group": (_EXPERTS,),
    "context group": ("another --cp-comm-type",),
    "all ranks": ("a higher --log-interval", "fewer timers"),
    "data loading": ("more --num-workers", "faster storage"),
    "save": (_SAVES, "a higher --save-interval"),
    "evaluation wait": _BUBBLES,
    "logging": ("a higher --log-interval",),
    GAP: ("--fill-between", "a shorter requeue"),
}
# What such a flag needs beside it: a flag of any value, named with one that works, or something else.
_NEEDED: dict[str, tuple[str, ...]] = {
    _TENSOR: ("--sequence-parallel", "Transformer Engine"),
    "--overlap-param-gather": ("--use-distributed-optimizer", _REDUCE),
    _EXPERTS: (f"{_DISPATCHER} alltoall",),
    _SAVES: (_SAVER, "--async-strategy mcore"),
}
# The experts' exchange overlaps with one of the first, in several stages also one of the second, and none of the last.
_HALVES = ("--bf16", "--fp16")
_CHUNKS = ("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank")
_NEVER = ("--recompute-method", "--recompute-num-layers", "--moe-shared-expert-overlap")


def print_account(accounts: Sequence[AccountReport], console: Console, command: str) -> None:
    """Print the account, or that no rank left one.

    Args:
        command: the training's command line; what it has already is not named as a remedy.
    """
    if not accounts:
        line = "Where the time of the ranks went is not known: no rank has written an account\n"
        console.print(line, highlight=False)
        return
    console.print(_table(accounts, _had(command, accounts[-1])), "")
    late = [one for one in accounts if one.rank is not None and one.host_late_s >= _LEAST_LATE * one.wall_s]
    if late:
        most_s = max(one.host_late_s for one in late)
        who = listed([one.rank for one in late if one.rank is not None], _RANKS)
        line = f"ready, but without a core, as others had it: {who}, for up to {most_s:,.1f} s"
        console.print(line, highlight=False)
    blind = sum(one.blind for one in accounts if one.rank is not None)
    if blind:  # no wait was seen in a training of several stages
        line = f"on {blind} of {len(accounts) - 1} ranks: {BLIND}"
        console.print(line, style="bold red", highlight=False)


def _had(command: str, whole: AccountReport) -> set[str]:
    """Return the flags of a training, with those that it cannot have, that would do nothing in it, or fill no more."""
    words = command.replace("=", " ").split()
    had, values = set(words), dict(pairwise(words))
    if not had.isdisjoint(("--fill-jobs", "--fill-store")):
        had.update(_BUBBLES)
    if all(one.name != _REPLICAS for one in whole.times):
        had.add(_REDUCE)
    if values.get("--transformer-impl") == "local":
        had.add(_TENSOR)
    if values.get("--ckpt-format") == "torch":
        had.add(_SAVES)
    elif _SAVER not in had:  # Megatron switches it off
        had.discard(_SAVES)
    if values.get(_DISPATCHER) not in ("alltoall", "flex"):
        had.discard(_DISPATCHER)
    if not _overlaps_experts(had, values):
        had.add(_EXPERTS)
    return had


def _overlaps_experts(had: Collection[str], values: Mapping[str, str]) -> bool:
    """True if Megatron accepts that the experts' exchange overlaps in a training with these flags."""
    stages, experts = (values.get(f"--{kind}-model-parallel-size", "1") for kind in ("pipeline", "expert"))
    chunks = stages == "1" or any(flag in had for flag in _CHUNKS)
    return (
        experts != "1" and chunks and any(flag in had for flag in _HALVES) and not any(flag in had for flag in _NEVER)
    )


def _helps(name: str, had: Collection[str]) -> Iterator[str]:
    """Yield what helps against a kind of idle time, with what that needs and the training has not."""
    for remedy in _REMEDIES.get(name, ()):
        if remedy not in had:
            lacking = [need for need in _NEEDED.get(remedy, ()) if need.split()[0] not in had]
            yield f"{remedy} with {' and '.join(lacking)}" if lacking else remedy


def _table(accounts: Sequence[AccountReport], had: Collection[str]) -> Table:
    """Return a table of the time of all ranks, and of what helps against each kind of idle time."""
    whole, ranks = accounts[-1], accounts[:-1]
    title = f"Where the time of the ranks went: {whole.wall_s:,.1f} s, {whole.named_share:.2%} of it named"
    table = new_table(title, "<what", ">share", ">least", ">most", ">in\nstretches\nover 1 ms", "what helps")
    shares = [{one.name: one.share for one in rank.times} for rank in ranks]
    for compute in (True, False):
        for one in whole.times:
            if one.compute is compute:
                its = [share.get(one.name, 0.0) for share in shares]
                cells = (f"{share:.1%}" for share in (one.share, min(its), max(its), one.long_s / whole.wall_s))
                table.add_row(one.name, *cells, "; ".join(_helps(one.name, had)))
        table.add_section()
    return table


def print_timers(found: Sequence[TimerReport], console: Console) -> None:
    """Print the timers that the account has too; nothing without one."""
    title = "Megatron's own timers beside the account, in seconds of all ranks"
    table = new_table(title, "timers", ">timers", ">account", ">differ", "what in the account")
    for one in found:
        if one.account_s is not None and one.difference_s is not None:
            share = f"{one.difference_s / one.time_s:+.1%}" if one.time_s else "-"
            cells = (f"{one.time_s:,.2f}", f"{one.account_s:,.2f}", share)
            more = f" and {len(one.timers) - _TIMERS} more" if len(one.timers) > _TIMERS else ""
            table.add_row(", ".join(one.timers[:_TIMERS]) + more, *cells, ", ".join(one.rows))
    if table.row_count:
        console.print(table, "")


def print_waits(found: Sequence[Awaited], console: Console) -> None:
    """Print whom the ranks waited for in their pipeline; nothing if that is not known."""
    all_s = sum(one.computed_s + one.host_s + one.transfer_s for one in found)
    if not all_s:
        return
    title = f"Waits for other stages, latest {counted(found[0].iterations, 'iteration')}: {all_s:,.2f} s"
    table = new_table(
        title, ">rank", ">waited\nfor rank", ">s", ">which\ncomputed", ">whose host\nwas late", ">transfer"
    )
    for one in found[:_WAITS]:
        parts = one.computed_s, one.host_s, one.transfer_s
        if sum(parts) >= _LEAST_WAIT * all_s:
            shares = (f"{part / sum(parts):.0%}" for part in parts)
            table.add_row(str(one.rank), str(one.peer), f"{sum(parts):,.2f}", *shares)
    console.print(table, "")


def late_lines(found: Sequence[Late]) -> Iterator[str]:
    """Yield a line on each of the waits in which ranks were late, for the longest of them."""
    found = [one for one in found if round(one.late_s, 1)]  # as printed: not by 0.0 s
    for one in found[:_LATE]:
        others = "the other rank" if one.others == 1 else f"the {one.others:,} others each"
        yield f"late in {one.wait}: {listed(one.ranks, _RANKS)}; {others} waited {one.late_s:,.1f} s more"
    if len(found) > _LATE:
        yield f"  and {len(found) - _LATE:,} more; report.json has them all"

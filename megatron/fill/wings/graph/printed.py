"""Plans as tables of 80 columns."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from megatron.fill.wings.graph.search import Found
from megatron.fill.wings.graph.timeline import GraphTimeline

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_COLUMNS = 80  # if the output is not a terminal
_LEAST = {"MEMORY": 9, "AFTER": 7}  # columns


def print_timeline(timeline: GraphTimeline) -> None:
    """Print a line per stage, and the duration of an iteration."""
    from rich.text import Text

    plan = timeline.plan
    table = _table("STAGE>", "DEV>", "BATCH>", "ORDER", "FLIGHT>", "MEMORY>", "IDLE>", "AFTER", "OPERATORS")
    for number, stage in enumerate(plan.stages):
        ends = list(dict.fromkeys((stage.operators[0], stage.operators[-1])))
        cells = (
            str(number),
            str(len(stage.devices)),
            str(stage.micro_batch),
            f"{stage.k}F{stage.k}B",
            str(stage.in_flight),
            _size(plan.memory_bytes(number)),
            f"{timeline.bubble_share(number):.0%}",
            _few([str(before) for before in plan.predecessors(number)]) or "-",
            " … ".join(ends),
        )
        table.add_row(*map(Text, cells))
    _console().print(table)
    print(
        f"\n{len(plan.stages)} stages on {plan.devices} of {plan.cluster.devices} devices, {plan.depth} deep"
        f"{'; sequential' if plan.sequential else ''}"
    )
    print(
        f"an iteration of {plan.batch} samples: {_time(timeline.period_ns / 1e9)}, {timeline.samples_s:,.4g} samples/s"
    )
    print(f"time per sample at the bottleneck: {_time(plan.bottleneck_s)}")
    print(f"bubbles: {timeline.bubble_share():.1%} of the time of these devices")
    if plan.graph.ahead:
        bubble_s = timeline.bubble_share() * timeline.period_ns / 1e9
        ahead_s = plan.costs.ahead_s(min(its.micro_batch for its in plan.stages)) / plan.devices
        print(
            f"ahead: {len(plan.graph.ahead)} operators, {_time(ahead_s)} of each device's {_time(bubble_s)} of bubbles"
        )


def print_faster(replicated: GraphTimeline, planned: GraphTimeline) -> None:
    """Print how the model is trained as one data-parallel stage, which is faster than the plan."""
    (stage,) = replicated.plan.stages
    less = 1 - replicated.period_ns / planned.period_ns
    print(
        f"\nFaster by the same costs: no pipeline, but one data-parallel stage on {len(stage.devices)} devices,\n"
        f"with micro-batches of {stage.micro_batch}: {_time(replicated.period_ns / 1e9)} an iteration, {less:.1%} less."
    )


def print_comparison(found: Mapping[str, Found], seconds: Mapping[str, float]) -> None:
    """Print a line per planner.

    Args:
        found: results by planner; the first one is the reference.
        seconds: duration of each planner's search.
    """
    from rich.text import Text

    table = _table("PLANNER", "ITERATION>", "SPEED>", "STAGES>", "DEEP>", "IDLE>", "MEMORY>", "SEARCH>")
    first = next(iter(found.values())).timeline
    for name, its in found.items():
        plan, timeline = its.plan, its.timeline
        cells = (
            name,
            _time(timeline.period_ns / 1e9),
            f"{first.period_ns / timeline.period_ns:.3f}",
            str(len(plan.stages)),
            str(plan.depth),
            f"{timeline.bubble_share():.1%}",
            _size(max(plan.memory_bytes(number) for number in range(len(plan.stages)))),
            _time(seconds[name]),
        )
        table.add_row(*map(Text, cells))
    print()
    _console().print(table)
    print("\nSPEED: against the first; MEMORY: the most of a device")


def _table(*columns: str) -> Table:
    """Return a table with these columns; ``>`` marks numeric ones.  The last column is cut if a line is too long."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        name = column.removesuffix(">")
        least = _LEAST.get(name, len(name))
        table.add_column(name, justify="left" if name == column else "right", no_wrap=True, min_width=least)
    table.columns[-1].overflow = "ellipsis"
    return table


def _console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _COLUMNS, highlight=False)


def _few(names: list[str]) -> str:
    return " ".join(names) if len(names) <= 3 else f"{names[0]} {names[1]} … {names[-1]}"


def _size(size: float) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size:.0f} B"


def _time(seconds: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.4g} {name}"
    return f"{seconds * 1e6:.4g} us"

"""Plans as tables of 80 columns."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.fill.console import console_of
from megatron.fill.display import amount, counted, plain_table, size
from megatron.fill.wings.graph.search import Found
from megatron.fill.wings.graph.timeline import GraphTimeline

_COLUMNS = 80  # if the output is not a terminal
_LEAST = {"MEMORY": 9, "AFTER": 7}  # columns


def print_timeline(timeline: GraphTimeline) -> None:
    """Print a line per stage, and the duration of an iteration."""
    from rich.text import Text

    plan = timeline.plan
    heads = ">STAGE", ">DEV", ">BATCH", "<ORDER", ">FLIGHT", ">MEMORY", ">IDLE", "<AFTER", "<OPERATORS"
    table = plain_table(*heads, gap=1)
    for head, column in zip(heads, table.columns[:-1], strict=False):  # the last column is cut if a line is too long
        column.min_width = _LEAST.get(head[1:], len(head) - 1)
    for number, stage in enumerate(plan.stages):
        ends = list(dict.fromkeys((stage.operators[0], stage.operators[-1])))
        cells = (
            str(number),
            str(len(stage.devices)),
            str(stage.micro_batch),
            f"{stage.k}F{stage.k}B",
            str(stage.in_flight),
            size(plan.memory_bytes(number)),
            f"{timeline.bubble_share(number):.0%}",
            _few([str(before) for before in plan.predecessors(number)]) or "-",
            " … ".join(ends),
        )
        table.add_row(*map(Text, cells))
    console_of(_COLUMNS).print(table)
    shape = f"{counted(len(plan.stages), 'stage')} on {plan.devices} of {counted(plan.cluster.devices, 'device')}"
    print(f"\n{shape}, {plan.depth} deep{'; sequential' if plan.sequential else ''}")
    rate = f"{amount(timeline.samples_s)} samples/s"
    print(f"an iteration of {plan.batch} samples: {_time(timeline.period_ns / 1e9)}, {rate}")
    print(f"time per sample at the bottleneck: {_time(plan.bottleneck_s)}")
    print(f"bubbles: {timeline.bubble_share():.1%} of the time of these devices")
    if plan.graph.ahead:
        bubble_s = timeline.bubble_share() * timeline.period_ns / 1e9
        ahead_s = plan.costs.ahead_s(min(its.micro_batch for its in plan.stages)) / plan.devices
        operators = counted(len(plan.graph.ahead), "operator")
        print(f"ahead: {operators}, {_time(ahead_s)} of each device's {_time(bubble_s)} of bubbles")


def print_faster(replicated: GraphTimeline, planned: GraphTimeline) -> None:
    """Print how the model is trained as one data-parallel stage, which is faster than the plan."""
    (stage,) = replicated.plan.stages
    less = 1 - replicated.period_ns / planned.period_ns
    print(
        f"\nFaster by the same costs: no pipeline, but one data-parallel stage on {len(stage.devices)} devices,\n"
        f"with micro-batches of {stage.micro_batch}: {_time(replicated.period_ns / 1e9)} an iteration, {less:.1%} less."
    )


def print_comparison(found: Mapping[str, Found], seconds: Mapping[str, float]) -> None:
    """Print a line per planner, with what it found and the duration of its search; the first one is the reference."""
    from rich.text import Text

    heads = "<PLANNER", ">ITERATION", ">SPEED", ">STAGES", ">DEEP", ">IDLE", ">MEMORY", ">SEARCH"
    table = plain_table(*heads, gap=1)
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
            size(max(plan.memory_bytes(number) for number in range(len(plan.stages)))),
            _time(seconds[name]),
        )
        table.add_row(*map(Text, cells))
    print()
    console_of(_COLUMNS).print(table)
    print("\nSPEED: against the first; MEMORY: the most of a device")


def _few(names: list[str]) -> str:
    return " ".join(names) if len(names) <= 3 else f"{names[0]} {names[1]} … {names[-1]}"


def _time(seconds: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.4g} {name}"
    return f"{seconds * 1e6:.4g} us"

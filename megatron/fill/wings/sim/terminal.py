"""Results of simulations as tables of 80 columns, and as CSV."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from megatron.fill.display import amount, percent, plain_table, time_unit
from megatron.fill.linux.files import replacing
from megatron.fill.wings.sim.results import Completion, SimResult, UseOfTime, short_names

_MOST_GROUPS = 24  # groups of devices that are listed individually


def print_result(result: SimResult) -> None:
    console = Console(highlight=False)
    jobs = sum(result.jobs.values())
    console.print(
        f"{duration(result.duration_s)} of {result.total.devices:,} devices, {jobs:,} fill jobs, policy {result.policy}"
    )
    heads = "COUNT", "MAIN", "FILL", "UNUSED", "DOWN", "BUBBLES", "GPUS'\nWORTH", "GAIN"
    uses = plain_table("DEVICES", *(f">{head}" for head in heads), gap=1)
    for use in (result.total, *result.groups[:_MOST_GROUPS]):
        uses.add_row(escape(use.name), f"{use.devices:,}", *_use_cells(use))
    console.print(uses)
    if len(result.groups) > _MOST_GROUPS:
        console.print(f"... and {len(result.groups) - _MOST_GROUPS} more groups of devices (--json has them all)")
    kinds = plain_table("KIND", ">JOBS", ">DONE", ">FAILED", ">MEDIAN", ">95%", ">GPUS'\nWORTH", gap=1)
    for kind in result.kinds:
        if kind.jobs:
            row = (f"{kind.jobs:,}", f"{kind.succeeded:,}", f"{kind.failed:,}", *_completion_cells(kind.completion))
            kinds.add_row(escape(kind.kind), *row, amount(kind.gpus_worth))
    console.print()
    console.print(kinds)
    console.print()
    for line in _sentences(result):
        console.print(line)


def print_comparison(results: Sequence[SimResult]) -> None:
    console = Console(highlight=False)
    swept = list(results[0].what)
    heads = *short_names(swept).values(), "policy", "main", "fill", "bubbles", "GPUs'\nworth"
    heads = *heads, "median", "95%", "due\nmet", "saved\na day"
    table = plain_table(*(f">{head.upper()}" for head in heads), gap=1)
    for one in results:
        due, met = one.deadlines
        total = one.total
        table.add_row(
            *(escape(str(one.what[name])) for name in swept),
            escape(one.policy),
            f"{total.main:.1%}",
            f"{total.fill:.1%}",
            percent(total.bubble),
            amount(total.gpus_worth),
            *_completion_cells(one.completion),
            f"{met / due:.0%}" if due else "-",
            "-" if one.saved_per_day is None else f"{one.saved_per_day:,.0f}",
        )
    console.print(table)


def _sentences(result: SimResult) -> list[str]:
    states = ", ".join(f"{number:,} {state}" for state, number in result.jobs.items() if number)
    lines = [f"Jobs: {states or 'none'}."]
    if result.completion:
        its = result.completion
        lines.append(
            f"From arrival to success: mean {duration(its.mean_s)}, half within {duration(its.median_s)}, 95% within "
            f"{duration(its.p95_s)}."
        )
    if result.truncated and result.completion:
        lines.append(f"{result.truncated:,} jobs were not done at the end, so these times lean to the shorter ones.")
    if result.deadlines[0]:
        due, met = result.deadlines
        lines.append(f"Deadlines met: {met:,} of {due:,} ({met / due:.1%}).")
    if result.failures:
        lines.append(f"Devices that failed: {result.failures:,}.")
    if result.saved_per_day is not None:
        lines.append(f"On devices of its own the fill work would cost {result.saved_per_day:,.2f} a day.")
    return lines


def write_csv(path: Path, results: Sequence[SimResult]) -> None:
    """Write a line per simulation; an unknown value is empty."""
    with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        rows = [_flat(result) for result in results]
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _flat(result: SimResult) -> dict[str, object]:
    total, done = result.total, result.completion
    return {
        **result.what,
        "policy": result.policy,
        "duration_s": result.duration_s,
        "devices": total.devices,
        "main": total.main,
        "fill": total.fill,
        "down": total.down,
        "bubble_share": total.bubble,
        "gpus_worth": total.gpus_worth,
        "gain": total.gain,
        **{f"jobs_{state.lower()}": number for state, number in result.jobs.items()},
        "completion_mean_s": done and done.mean_s,
        "completion_median_s": done and done.median_s,
        "completion_p95_s": done and done.p95_s,
        "deadlines": result.deadlines[0],
        "deadlines_met": result.deadlines[1],
        "saved_per_day": result.saved_per_day,
        "failures": result.failures,
    }


def duration(seconds: float) -> str:
    """Format a duration, such as ``4.2 h``."""
    unit_s, _, sign = time_unit(seconds / 2)
    return f"{seconds / unit_s:.3g} {sign}"


def _use_cells(use: UseOfTime) -> tuple[str, ...]:
    gain = "-" if use.gain is None else f"+{use.gain:.0%}"
    shares = (use.main, use.fill, use.unused, use.down)
    return (*(f"{share:.1%}" for share in shares), percent(use.bubble), amount(use.gpus_worth), gain)


def _completion_cells(completion: Completion | None) -> tuple[str, str]:
    return ("-", "-") if completion is None else (duration(completion.median_s), duration(completion.p95_s))

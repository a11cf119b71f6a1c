"""The figures of two runs side by side, in 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron.fill.report.rows import new_table
from megatron.fill.report.schema import Report, Slowdown
from megatron.fill.types import JobState


class Figure(NamedTuple):
    """A figure of two runs, as text."""

    name: str
    values: tuple[str, str]
    difference: str  # the second less the first; empty if one is not known


def compared(first: Report, second: Report) -> Iterator[Figure]:
    """Yield the figures of both runs, and how they differ."""

    def one(name: str, of: Callable[[Report], float | None], form: str, unit: str = "") -> Figure:
        values = of(first), of(second)
        before, after = ("-" if value is None else format(value, form) + unit for value in values)
        difference = ""
        if values[0] is not None and values[1] is not None:
            more, points = values[1] - values[0], form.endswith("%")
            difference = format(100 * more, f"+{form[:-1]}f") + " pp" if points else format(more, f"+{form}") + unit
        return Figure(name, (before, after), difference)

    def median_ms(report: Report) -> float | None:
        return None if report.total.iteration_time is None else report.total.iteration_time.median_s * 1e3

    yield one("iterations", lambda its: its.summary.iterations, ",d")
    yield one("median iteration", median_ms, ",.1f", " ms")
    yield one("bubble share", lambda its: its.summary.bubble_share, ".1%")
    yield one("harvest ratio", lambda its: its.summary.harvest_ratio, ".1%")
    yield one("harvested", lambda its: its.total.harvested_s, ",.1f", " s")
    yield one("steps", lambda its: its.total.steps, ",d")
    slowdowns = first.summary.slowdown, second.summary.slowdown
    yield one("slowdown", lambda its: None if its.summary.slowdown is None else its.summary.slowdown.mean, ".2%")
    yield Figure("  95% interval", (_interval(slowdowns[0]), _interval(slowdowns[1])), "")
    yield one("brakes", lambda its: its.summary.brakes, "d")
    yield one("jobs done", lambda its: sum(job.state is JobState.SUCCEEDED for job in its.jobs), "d")
    yield one("jobs failed", lambda its: sum(job.state is JobState.FAILED for job in its.jobs), "d")
    yield one("prediction error", lambda its: its.total.prediction_error_ms, ",.2f", " ms")


def _interval(slowdown: Slowdown | None) -> str:
    return "-" if slowdown is None else f"{slowdown.ci95[0]:+.1%} to {slowdown.ci95[1]:+.1%}"


def print_compared(names: tuple[str, str], first: Report, second: Report, console: Console) -> None:
    """Print the figures of both runs, and whether the slowdowns differ beyond their intervals."""
    table: Table = new_table("")
    table.add_column("")
    for name in (*names, "difference"):
        table.add_column(escape(name), justify="right", overflow="fold", max_width=24)
    for figure in compared(first, second):
        table.add_row(figure.name, *figure.values, figure.difference)
    console.print(table)
    one, other = first.summary.slowdown, second.summary.slowdown
    if one is not None and other is not None:
        apart = one.ci95[0] > other.ci95[1] or other.ci95[0] > one.ci95[1]
        console.print(f"The intervals of the slowdowns {'do not ' if apart else ''}overlap.", highlight=False)

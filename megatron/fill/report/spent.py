"""The use of bubble time and the cost of filling, on a terminal."""

from __future__ import annotations

from rich.table import Table

from megatron.fill.report.rows import add_rows, named_rows, new_table
from megatron.fill.report.schema import Cost, Report, Totals
from megatron.fill.report.timeuse import TimeUse

_HEADINGS = {
    TimeUse.STEPS: "in\nsteps",
    TimeUse.WAKING: "wak-\ning",
    TimeUse.RUNTIME: "run-\ntime",
    TimeUse.MISSED: "missed",
    TimeUse.HELD: "held",
    TimeUse.LITTLE_TIME: "little\ntime",
    TimeUse.PAST_PREDICTION: "past\nend",
    TimeUse.LITTLE_MEMORY: "little\nmemory",
    TimeUse.NO_JOB: "no\njob",
    TimeUse.TOO_SHORT: "too\nshort",
    TimeUse.NOT_PREDICTED: "not pre-\ndicted",
    TimeUse.NOT_KNOWN: "not\nknown",
}

_LEAST = 0.0005  # share of the whole from which on a use has a column: all of them are too wide for 80 columns


def use_table(report: Report) -> Table:
    """Return a table of the uses of the bubble time with filling on, in percent."""
    total = report.total.time_use_ns
    least_ns = _LEAST * sum(total.values())
    used = [use for use in TimeUse if use is TimeUse.STEPS or total[use] > least_ns]

    def cells(totals: Totals) -> list[str]:
        whole_ns = sum(totals.time_use_ns.values())
        return [f"{totals.time_use_ns[use] / whole_ns:.1%}" if whole_ns else "-" for use in used]

    table = new_table("Where the bubble time with filling on went")
    first, rows = named_rows(report)
    table.add_column(first, justify="right", no_wrap=True)
    for use in used:
        table.add_column(_HEADINGS[use], justify="right", no_wrap=True)
    add_rows(table, rows, cells)
    return table


def cost_lines(cost: Cost) -> list[str]:
    """Return lines with the training's time with and without filling, and the saving or the inputs missing for it."""
    lines = []
    if cost.with_s is not None:
        without = "not known" if cost.without_s is None else f"{cost.without_s:,.2f} s"
        lines.append(f"time of the training with filling: {cost.with_s:,.2f} s; the same without: {without}")
    if cost.saving is None or cost.saving_ci95 is None or cost.prices is None:
        return [*lines, f"cost saving: not known, for lack of {' and '.join(cost.lacking)}"]
    low, high = cost.saving_ci95
    prices = f"at {cost.prices.main:g} an hour for the training and {cost.prices.side:g} for a side device"
    lines.append(f"cost saving: {cost.saving:+.2%} (95% interval {low:+.2%} to {high:+.2%}), {prices}")
    side_s = sum(work.side_s or 0.0 for work in cost.work)
    measured = sum(work.measured for work in cost.work)
    stated = len(cost.work) - measured
    of = [f"{stated} by the throughput in the jobs file"] if stated else []
    of += [f"{measured} by the rate alone on this device"] if measured else []
    return [*lines, f"  side work: {side_s:,.2f} s of a side device; of jobs: {', '.join(of) or 'none'}"]

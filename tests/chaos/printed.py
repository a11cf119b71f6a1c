"""The outcome of a chaos run on a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tests.chaos.controls.engine import Controlled
from tests.chaos.results import ChaosResult


def print_result(result: ChaosResult, console: Console) -> None:
    """Print a row per kind, the kinds that were not run, and the totals."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("FAULT", overflow="fold", min_width=12)
    for heading in (
        "CAUSES",
        "MARKS",
        "MAIN JOB\nFAILED",
        "LOSSES\nDIFFER",
        "JOBS\nLOST",
        "LONGEST\nITER. S",
        "SLOWER\n%",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in result.kinds:
        table.add_row(
            one.kind,
            str(one.injected),
            str(one.marks),
            str(one.main_failures),
            str(one.loss_differences),
            str(one.jobs_lost),
            "-" if one.longest_s is None else f"{one.longest_s:.2f}",
            "-" if one.slowed is None else f"{100 * one.slowed:.1f}",
        )
    console.print(table)
    console.print(_outcomes(result))
    for kind, why in result.not_run.items():
        console.print(f"not run: {kind}: {why}", highlight=False)
    for kind, why in result.untested.items():
        console.print(f"untested: {kind}: {shown(why)}", highlight=False, markup=False)
    for kind, why in result.never_tried.items():
        console.print(f"never tried: {kind}: {shown(why)}", highlight=False, markup=False)
    for lost in result.findings.lost:
        console.print(f"lost: {lost.job}: {shown(lost.why)}", highlight=False, markup=False)
    _print_totals(result, console)


def print_controls(controls: Sequence[Controlled], console: Console) -> None:
    """Print a row per kind of attack: the layers left out, and the outcome without these and behind all of them."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("ATTACK", no_wrap=True)
    table.add_column("WITHOUT", ratio=3, overflow="fold")
    table.add_column("IT WAS", no_wrap=True)
    table.add_column("BEHIND\nALL", no_wrap=True)
    for one in controls:
        without = one.without.word if one.without is not None else "-"
        behind = one.behind.word if one.behind is not None else "-"
        table.add_row(
            one.kind, ", ".join(one.walls), "-" if one.impossible else "UNTESTED" if one.wrong else without, behind
        )
    console.print(table)
    for one in controls:
        if one.wrong:
            console.print(f"untested: {one.kind}: {shown(one.wrong)}", highlight=False, markup=False)
    held = sum(not one.wrong for one in controls)
    console.print(f"{held} of {len(controls)} controls succeeded", highlight=False)


def _outcomes(result: ChaosResult) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("FAULT", no_wrap=True)
    table.add_column("EXPECTED", ratio=2, overflow="fold")
    table.add_column("OBSERVED", ratio=3, overflow="fold")
    for one in result.kinds:
        table.add_row(one.kind, one.expected, Text(shown(one.observed)))
    return table


def shown(text: str, most: int = 160) -> str:
    """A job's text as one line, without characters that a terminal acts on."""
    plain = "".join(one if one.isprintable() else "?" for one in text)
    return plain if len(plain) <= most else plain[: most - 3] + "..."


def _print_totals(result: ChaosResult, console: Console) -> None:
    total = result.summary
    console.print(
        f"{total['injected']} faults ({total['marks']} marks) of {total['kinds']} kinds "
        f"in {total['trainings']} trainings and {total['jobs']} "
        f"jobs: {total['main_failures']} trainings failed, {total['loss_differences']} losses differ, "
        f"{total['jobs_lost']} jobs were lost, {total['leaked_processes']} processes were left, "
        f"{total['stalls']} iterations stalled, {len(total['slowed'])} kinds slowed the training; "
        f"{total['controls']} controls succeeded, {len(total['untested'])} kinds are untested, "
        f"{len(total['never_tried'])} were never tried",
        highlight=False,
    )
    slowed, after, startup = total["slowdown"], total["recovery_s"], total["startup_s"]
    if slowed:
        low, high = (100 * value for value in slowed["ci95"])
        console.print(
            f"slowdown while faults were injected: {100 * slowed['mean']:.2f}% (95% interval {low:.2f} to {high:.2f}, "
            f"{slowed['pairs']} pairs of windows)",
            highlight=False,
        )
    if after:
        began = f", and its start-up took {startup['median']:.2f} s" if startup else ""
        console.print(
            f"the next worker started {after['median']:.2f} s after the end of the last (median; 95% within "
            f"{after['p95']:.2f} s){began}",
            highlight=False,
        )

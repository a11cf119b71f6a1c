"""The report at the end of a training, on rank 0: files in the run folder, tables on the terminal."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from megatron.fill.app.runfolder import store_of
from megatron.fill.config import FillSettings
from megatron.fill.records import Segment, Unwritten
from megatron.fill.store.location import print_next
from megatron.fill.store.states import current_states


def report_end(settings: FillSettings, run_dir: Path, segment: Segment, unwritten: Mapping[int, Unwritten]) -> None:
    """Make, print and write the report of a training.

    Args:
        segment: the segment that has ended.
        unwritten: parts of its records that could not be written, by rank.

    Raises:
        OSError, FillError: not all could be written, or there is nothing to report.
    """
    from megatron.fill import report

    console = Console()
    if settings.profile_only:
        cycles = report.profile(segment, unwritten)
        report.print_cycle(cycles, console)
        records = report.account_records([segment])
        accounts = report.account([segment], records)
        report.print_account(accounts, console)
        report.print_timers(report.timers(records, accounts), console)
        report.write_cycles(run_dir / "bubbles.json", cycles)
        print(f"PipeFill: bubble cycles in {run_dir / 'bubbles.json'}")
        return
    store = store_of(settings, run_dir)
    try:
        made = report.compose(
            run_dir,
            lambda names: current_states(store, run_dir, False, names),
            ended=segment,
            unwritten=unwritten,
        )
    except report.NotWritten as error:
        report.print_report(error.report, console)
        raise
    report.print_report(made, console)
    print(f"PipeFill: report.json, trace.json and timeline.png in {run_dir}")
    page = f"report {shlex.quote(str(run_dir))} --html {shlex.quote(str(run_dir / 'report.html'))}"
    if settings.serves:
        print_next(store, "list", "usage --by job", plain=[page])
    else:
        print_next(None, page)

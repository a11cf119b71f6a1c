"""``pipefill report``: the report of a run, whether it goes on, has ended, or was cut off."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from megatron.fill.cli.options import Json


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder, as the training printed it.")],
    store: Annotated[
        str | None,
        typer.Option("--store", "-s", metavar="URL|FILE|FOLDER", help="The job store.  [default: the run's own]"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make the report of a run from what its ranks and agents have written so far.

    Covers all segments: each time that the training was started in this run folder. Writes report.json, trace.json and
    timeline.png there, as a training does that ends by itself; --json prints the first of them.
    """
    from rich.console import Console

    from megatron.fill.records import Ending, last_segment
    from megatron.fill.report import compose, print_report
    from megatron.fill.store.standing import standing

    last = last_segment(run)
    where = store or last.store
    going = last.ending is Ending.RUNNING
    made = compose(run, partial(standing, where, run, going)) if where else compose(run)
    if as_json:
        print(made.model_dump_json(indent=2))
        return
    print_report(made, Console())
    print(f"report.json, trace.json and timeline.png in {run}")

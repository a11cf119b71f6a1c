"""``pipefill report``: the report of a run that is still going on, has ended, or was cut off."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from megatron.fill.cli.options import Json, warn_of_password
from megatron.fill.errors import ConfigError
from megatron.fill.given.quantities import parse_prices
from megatron.fill.types import Prices


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder, as the training printed it.")],
    store: Annotated[
        str | None,
        typer.Option(
            "--store",
            "-s",
            metavar="URL|FILE|FOLDER",
            callback=warn_of_password,
            help="The job store.  [default: the run's own]",
        ),
    ] = None,
    price: Annotated[
        str | None,
        typer.Option(
            "--price",
            metavar="main=M,side=S",
            help="What an hour costs, in any currency: of all that the training runs on, and of one cheaper device "
            "for the jobs.  [default: the run's own]",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make the report of a run from what its ranks and agents have written so far.

    It covers all segments, which are the starts of the training in this run folder. Writes report.json, trace.json and
    timeline.png there, as a training does that ends by itself; --json prints the first of them.
    """
    from rich.console import Console

    from megatron.fill.records import SegmentEnding, last_segment
    from megatron.fill.report import NotWritten, Report, compose, print_report
    from megatron.fill.store.standing import standing

    prices = None if price is None else _prices(price)
    last = last_segment(run)
    where = store or last.store
    going = last.ending is SegmentEnding.RUNNING

    def show(made: Report) -> None:
        if as_json:
            print(made.model_dump_json(indent=2))
        else:
            print_report(made, Console())

    try:
        show(compose(run, partial(standing, where, run, going), prices) if where else compose(run, prices=prices))
    except NotWritten as error:
        show(error.report)
        raise
    if not as_json:
        print(f"report.json, trace.json and timeline.png in {run}")


def _prices(text: str) -> Prices:
    from megatron.fill.given.problems import shown

    try:
        return parse_prices(text)
    except ValueError as error:
        raise ConfigError(f"--price is {shown(text)}: {error}") from None

"""``pipefill report``: the report of a run that is still going on, has ended, or was cut off."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from megatron.fill.cli.options import Json, check_writable, parsed, store_option
from megatron.fill.display import report_console
from megatron.fill.errors import ConfigError
from megatron.fill.given.quantities import parse_prices

if TYPE_CHECKING:
    from megatron.fill.report import Ask, Report


def report(
    run: Annotated[Path, Argument(metavar="RUN", help="The run folder, as the training printed it.")],
    store: Annotated[str | None, store_option("The job store.  [default: the run's own]", envvar=None)] = None,
    price: Annotated[
        str | None,
        Option(
            metavar="main=M,side=S",
            help="What an hour costs, in any currency: of all that the training runs on, and of one cheaper device "
            "for the jobs.  [default: the run's own]",
        ),
    ] = None,
    html: Annotated[
        Path | None, Option(metavar="FILE", help="Write it as a page with charts, too, which needs no network.")
    ] = None,
    compare: Annotated[
        Path | None, Option(metavar="OTHER", help="Print the figures of OTHER and RUN side by side instead.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make the report of a run from what its ranks and agents have written so far.

    It covers all segments, which are the starts of the training in this run folder. Writes report.json, trace.json and
    timeline.png there, as a training does that ends by itself; --json prints the first of them.
    """
    from megatron.fill.records.segment import SegmentEnding, last_segment
    from megatron.fill.report import compose, print_report
    from megatron.fill.report.compare import print_compared
    from megatron.fill.report.page import library, write_page
    from megatron.fill.store.states import current_states

    prices = None if price is None else parsed("--price", price, parse_prices)
    if compare is not None and (as_json or html is not None):
        raise ConfigError("--compare prints a table; expected neither --json nor --html with it")
    if html is not None:
        last_segment(run)  # before the file is touched
        check_writable(html=html)
        library()

    def made(folder: Path, show: Callable[[Report], None] = lambda report: None) -> Report:
        last = last_segment(folder)
        # Jobs that run go on with the training, or between two.
        where, going = store or last.store, last.ending is SegmentEnding.RUNNING or bool(last.between())
        ask: Ask = partial(current_states, where, folder, going) if where else lambda names: {}
        page = None if html is None else partial(write_page, html, run)
        return compose(folder, ask, prices, page=page, show=show)

    def show(report: Report) -> None:
        if as_json:
            print(report.model_dump_json(indent=2))
        else:
            print_report(report, report_console())

    if compare is not None:
        print_compared((str(compare), str(run)), made(compare), made(run), report_console())
        return
    made(run, show)
    if not as_json:
        print(f"report.json, trace.json and timeline.png in {run}" + (f", the page in {html}" if html else ""))

"""The style of a report's tables on a terminal, and their rows of ranks or stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich import box
from rich.table import Table

from megatron.fill.display import plain_table
from megatron.fill.report.schema import Report, Totals
from megatron.fill.report.window import MANY

type Cells = Callable[[Totals], Sequence[str]]  # the cells of a row but the first one


def new_table(title: str, *headings: str) -> Table:
    """Return an empty ``plain_table`` in the report's style."""
    style: dict[str, Any] = {"box": box.SIMPLE_HEAD, "pad_edge": True, "show_edge": False, "title_justify": "left"}
    return plain_table(*headings, gap=1, title=title, **style)


def totals_table(report: Report, title: str, headings: Iterable[str], cells: Cells) -> Table:
    """Return a table with a row for each rank (or stage, if there are many ranks), and one for all."""
    rows: list[tuple[str, Totals]]
    if len(report.ranks) > MANY:
        first = ">stage"
        rows = [(str(stage.stage), stage) for stage in report.stages]
    elif all(rank.rank == rank.stage for rank in report.ranks):
        first = ">rank"
        rows = [(str(rank.rank), rank) for rank in report.ranks]
    else:
        first = ">rank/\nstage"
        rows = [(f"{rank.rank}/{rank.stage}", rank) for rank in report.ranks]
    table = new_table(title, first, *headings)
    for name, totals in rows:
        table.add_row(name, *cells(totals))
    if len(report.ranks) > 1:
        table.add_section()
        table.add_row("all", *cells(report.total), style="bold")
    return table


def listed(ranks: Sequence[int], most: int = 6) -> str:
    """Return ``rank 3``, or ``ranks 3, 4``; of more than ``most`` ranks the first, and how many more there are."""
    more = f" and {len(ranks) - most:,} more" if len(ranks) > most else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks[:most]))}{more}"

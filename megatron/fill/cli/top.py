"""``pipefill top``: a live view of a run, with keys for its operator."""

from __future__ import annotations

import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron.fill.cli.control import Run
from megatron.fill.errors import ConfigError, ControlError, StoreError

if TYPE_CHECKING:
    from rich.console import Group

    from megatron.fill.pages.control import ControlPage
    from megatron.fill.records import LiveSegment

_KEYS = {"p": "PAUSED", "r": "RUNNING", "d": "DRAINING"}
_MOST_ROWS = 64


def top(
    run: Run,
    every: Annotated[
        float, typer.Option("--every", metavar="SECONDS", min=0.2, max=3600, help="Time between two looks.")
    ] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one view and end, also where there is no terminal.")
    ] = False,
) -> None:
    """Watch a run: its ranks on all nodes, their bubbles and jobs, the queue and the slowdown.

    Keys: p pauses filling on this node, r resumes it, d drains it, q ends the view.  The figures are as old as the
    records: 10 iterations and 10 seconds.  Once jobs have settled (started, made their models), the harvest leaves out
    the time until then, as the report does.
    """
    from rich.console import Console
    from rich.live import Live

    view = _View(run)
    console = Console(highlight=False)
    if once:
        console.print(view.draw(keys=False))
        return
    if not (sys.stdin.isatty() and console.is_terminal):
        raise ConfigError("top needs a terminal; expected one, or --once")
    with _keys(), Live(view.draw(), console=console, screen=True, auto_refresh=False) as live:
        while (key := _key(every)) != "q":
            if key in _KEYS:
                view.change(_KEYS[key])
            live.update(view.draw(), refresh=True)


@contextmanager
def _keys() -> Iterator[None]:
    """Give each key at once, until the end of the block."""
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _key(seconds: float) -> str:
    """Return the next key; empty if none comes in time."""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return sys.stdin.read(1).lower() if ready else ""


class _View:
    """The known state of a run, read again for every view.

    Raises:
        FillError: the folder has no records.
    """

    def __init__(self, run: Path) -> None:
        from megatron.fill.records import LiveSegment, last_segment

        self._run = run
        self._segment = last_segment(run)
        self._live: LiveSegment = LiveSegment(self._segment)
        self._said = ""
        self._pages: list[ControlPage] = []

    def change(self, state: str) -> None:
        """Put the ranks on this node into a state."""
        from megatron.fill.pages.control import RunState

        if not self._found():
            self._said = "none of its ranks runs on this node: nothing was changed"
            return
        for page in self._pages:
            page.change(RunState[state])
        self._said = f"{state} on this node, at {time.strftime('%H:%M:%S')}"

    def _found(self) -> list[ControlPage]:
        from megatron.fill.pages.control import find_pages

        if not self._pages:
            try:
                self._pages = find_pages(self._run)
            except ControlError as error:
                self._said = self._said or str(error)
        return self._pages

    def draw(self, keys: bool = True) -> Group:
        """Return the view, with or without the line of keys."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        from megatron.fill.display import one_line

        self._live.look()
        states = {page.rank: page.state.name for page in self._found()}
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
        for heading in ("RANK", "STAGE", "NODE", "ITER", "MS", "BUBBLES", "HARVEST", "BRAKE"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("STATE", no_wrap=True)
        table.add_column("JOBS", no_wrap=True, overflow="ellipsis")
        ranks = list(self._live.ranks.items())
        for number, rank in ranks[:_MOST_ROWS]:
            braked = bool(rank.brakes) and rank.iteration < rank.brakes[-1].until
            recent = [one.duration_ns for one in list(rank.recent)[-20:]]
            table.add_row(
                str(number),
                str(rank.info.stage),
                str(rank.info.node),
                str(rank.iteration),
                f"{sum(recent) / len(recent) / 1e6:,.0f}" if recent else "-",
                _share(rank.bubble_ns.total(), rank.iteration_ns),
                _share(*rank.harvest),
                "on" if braked else "-",
                states.get(number, "-"),
                Text(one_line(", ".join(job.name for job, _ in rank.running))),
            )
        more = [Text(f"and {len(ranks) - _MOST_ROWS} ranks more")] if len(ranks) > _MOST_ROWS else []
        foot = [Text(self._said), *([Text("p pause  r resume  d drain  q quit", style="dim")] if keys else [])]
        return Group(Text(self._head(), overflow="fold"), Text(""), table, *more, Text(""), *foot)

    def _head(self) -> str:
        """Return the lines on the whole run."""
        live = self._live
        measured = live.slowdown
        slowdown = "not known yet"
        if measured is not None:
            slowdown = f"{measured.mean:+.1%} ({measured.low:+.1%} to {measured.high:+.1%})"
        return (
            f"{self._run}: {self._segment.ranks} ranks, {time.strftime('%H:%M:%S')}\n"
            f"bubbles {_percent(live.bubble_share)}, harvest {_percent(live.harvest_ratio)}, slowdown {slowdown}\n"
            f"jobs: {self._queue()}; {live.jobs_done} done since this start"
        )

    def _queue(self) -> str:
        from megatron.fill.store import open_store
        from megatron.fill.types import JobState

        if not self._segment.store:
            return "none"
        try:
            store = open_store(self._segment.store, create=False)
            try:
                states = [job.state for job in store.list([JobState.QUEUED, JobState.RUNNING])]
            finally:
                store.close()
        except StoreError:
            return "the store does not answer"
        return f"{states.count(JobState.QUEUED)} queued, {states.count(JobState.RUNNING)} running"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _percent(value: float) -> str:
    return "-" if value != value else f"{value:.1%}"

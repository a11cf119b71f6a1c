"""``pipefill top``: a live view of a run, with keys for its operator."""

from __future__ import annotations

import os
import re
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from megatron.fill.cli.control import Run
from megatron.fill.console import console_of, literal
from megatron.fill.display import counted, plain_table
from megatron.fill.errors import ConfigError, ControlError, FillError, StoreError
from megatron.fill.pages.control import ControlPage, RunState
from megatron.fill.pages.find import find_pages
from megatron.fill.store import open_store
from megatron.fill.types import JobState

if TYPE_CHECKING:
    from rich.console import Group

    from megatron.fill.records.live import LiveSegment
    from megatron.fill.records.segment import Segment

_KEYS = {"p": RunState.PAUSED, "r": RunState.RUNNING, "d": RunState.DRAINING}
_MOST_ROWS = 64
_FEWEST_ROWS = 4
_OTHER_LINES = 10  # of the view
# What arrows and function keys send: it ends with a letter, which may be one of the keys above.
_SEQUENCE = re.compile(rb"\x1b(?:[\[O][0-?]*[ -/]*[@-~])?")
_BEGUN = re.compile(rb"\x1b(?:[\[O][0-?]*[ -/]*)?$")
_REST_S = 0.1  # time for the rest of a sequence to come


def top(
    run: Run,
    every: Annotated[float, Option(metavar="SECONDS", min=0.2, max=3600, help="Time between two looks.")] = 2.0,
    once: Annotated[bool, Option("--once", help="Print one view and end, also where there is no terminal.")] = False,
) -> None:
    """Watch a run: its ranks on all nodes, their bubbles and jobs, the queue and the slowdown.

    Keys: p pauses filling on this node, r resumes it, d drains it, q ends the view.  When the training starts again,
    the view is of that start.  The figures are as old as the records: 10 iterations and 10 seconds.  Once jobs have
    settled (started, made their models), the harvest leaves out the time until then, as the report does.
    """
    from rich.live import Live

    view = _View(run)
    console = console_of()
    if once:
        console.print(view.draw(keys=False))
        return
    if not (sys.stdin.isatty() and console.is_terminal):
        raise ConfigError("top needs a terminal; expected one, or --once")
    with _keys(), Live(console=console, screen=True, auto_refresh=False) as live:
        pressed = ""
        while "q" not in pressed:
            for key in pressed:
                if key in _KEYS:
                    view.change(_KEYS[key])
            live.update(view.draw(rows=max(_FEWEST_ROWS, console.height - _OTHER_LINES)), refresh=True)
            pressed = _pressed(every)


@contextmanager
def _keys() -> Iterator[None]:
    """Give each key at once, until the end of the block."""
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _pressed(seconds: float) -> str:
    """Return the letters of the keys that are pressed, as soon as there is one; empty if none is in time."""
    pressed, terminal = b"", sys.stdin.fileno()
    while select.select([terminal], [], [], seconds)[0]:
        more = os.read(terminal, 1024)
        if not more:  # the terminal is gone
            return "q"
        pressed, seconds = pressed + more, _REST_S
        if not _BEGUN.search(pressed):
            break
    return _SEQUENCE.sub(b"", pressed).decode(errors="replace").lower()


class _View:
    """The known state of a run, read again for every view."""

    def __init__(self, run: Path) -> None:
        from megatron.fill.records.live import LiveSegment
        from megatron.fill.records.segment import last_segment

        self._run = run
        self._segment: Segment = last_segment(run)
        self._live: LiveSegment = LiveSegment(self._segment)
        self._said = ""
        self._pages: list[ControlPage] = []
        self._absent = ""  # why there are none

    def change(self, state: RunState) -> None:
        self._look()
        if not self._pages:
            self._said = f"nothing was changed: {self._absent}"
            return
        for page in self._pages:
            page.change(state)
        self._said = f"{state.name} on this node, at {time.strftime('%H:%M:%S')}"

    def _look(self) -> None:
        """Find the ranks on this node, and the newest start of the training; ranks may have come and gone."""
        from megatron.fill.records.live import LiveSegment
        from megatron.fill.records.segment import last_segment

        try:
            self._pages, self._absent = find_pages(self._run, self._pages), ""
        except ControlError as error:
            self._pages, self._absent = [], str(error)
        with suppress(FillError, OSError):  # the records may have been deleted: what was seen of them is still shown
            newest = last_segment(self._run)
            if newest.folder != self._segment.folder:
                self._live = LiveSegment(newest)
            self._segment = newest

    def _running(self) -> dict[int, list[str]]:
        """Return the names of the jobs that run, by rank: once the training has ended, those that go on without it."""
        from megatron.fill.records.segment import SegmentEnding

        running = {number: [job.name for job, _ in rank.running] for number, rank in self._live.ranks.items()}
        if self._segment.ending is SegmentEnding.RUNNING:
            return running
        found = {page.rank: running.get(page.rank, []) for page in self._pages}
        with suppress(FillError, OSError):
            for number, files in self._segment.between().items():
                if number in found:
                    attempts = files.attempts(steps=False)
                    found[number] = [job.name for job, _ in attempts if job.state is JobState.RUNNING]
        return found

    def draw(self, keys: bool = True, rows: int = _MOST_ROWS) -> Group:
        """Return the view, with or without the line of keys, and with a line for so many ranks at most."""
        from rich.console import Group
        from rich.text import Text

        self._look()
        self._live.look()
        states, running = {page.rank: page.state.name for page in self._pages}, self._running()
        numbers = (">RANK", ">STAGE", ">NODE", ">ITER", ">MS", ">BUBBLES", ">HARVEST", ">BRAKE")
        table = plain_table(*numbers, "<STATE", "<JOBS", gap=1)
        ranks, rows = list(self._live.ranks.items()), min(rows, _MOST_ROWS)
        for number, rank in ranks[:rows]:
            braked = bool(rank.brakes) and rank.iteration < rank.brakes[-1].until
            recent = [one.duration_ns for one in list(rank.recent)[-20:]]
            table.add_row(
                str(number),
                str(rank.info.stage),
                str(rank.info.node),
                str(rank.iteration),
                f"{sum(recent) / len(recent) / 1e6:,.0f}" if recent else "-",
                _share(rank.pipeline_ns, rank.watched_ns),
                _share(*rank.harvest),
                "on" if braked else "-",
                states.get(number, "-"),
                literal(", ".join(running.get(number, ()))),
            )
        more = [Text(f"and {counted(len(ranks) - rows, 'rank')} more")] if len(ranks) > rows else []
        foot = [Text("p pause  r resume  d drain  q quit", style="dim")] if keys else []
        said = Text(self._said or self._absent)
        return Group(Text(self._head(), overflow="fold"), Text(""), table, *more, Text(""), said, *foot)

    def _head(self) -> str:
        from megatron.fill.records.segment import SegmentEnding

        live, ending = self._live, self._segment.ending
        slowdown = "not known yet"
        if (its := live.slowdown) is not None:
            slowdown = f"{its.mean:+.1%} ({its.low:+.1%} to {its.high:+.1%})"
        ended = "" if ending is SegmentEnding.RUNNING else f", the training has ended: {ending}"
        return (
            f"{self._run}: {counted(self._segment.ranks, 'rank')}, {time.strftime('%H:%M:%S')}{ended}\n"
            f"bubbles {_percent(live.bubble_share)}, harvest {_percent(live.harvest_ratio)}, slowdown {slowdown}\n"
            f"jobs: {self._queue()}; {live.jobs_done} done since this start"
        )

    def _queue(self) -> str:
        from megatron.fill.store.location import database_file

        if not self._segment.store:
            return "none"
        try:
            file = database_file(self._segment.store)
            if file is not None and not file.exists():  # an agent makes it
                return "the store is not there yet"
            with closing(open_store(self._segment.store, create=False)) as store:
                jobs, now_s = store.list([JobState.QUEUED, JobState.RUNNING]), store.now_s()
        except StoreError:
            return "the store does not answer"
        queued = sum(job.state is JobState.QUEUED for job in jobs)
        lost = sum(job.lost(now_s) for job in jobs)
        running = f"{queued} queued, {len(jobs) - queued - lost} running"
        return f"{running}, {lost} lost" if lost else running


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _percent(value: float) -> str:
    return "-" if value != value else f"{value:.1%}"

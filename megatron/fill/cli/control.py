"""``pipefill pause``, ``resume``, ``drain``, ``kill`` and ``status``: an operator's control of a run's jobs."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument

from megatron.fill.cli.options import Json
from megatron.fill.cli.views import print_json
from megatron.fill.console import console_of
from megatron.fill.display import plain_table
from megatron.fill.pages.control import ControlPage, RunState
from megatron.fill.pages.find import damaged_notes, find_pages
from megatron.fill.pages.moving import RankStanding, find_standings, stillness

_LOOK_S = 0.005

Run = Annotated[Path, Argument(metavar="RUN", help="The run folder, as the training printed it.")]


def pause(run: Run, as_json: Json = False) -> None:
    """Start no further step on this node until resume.

    The last step of each task runs to its end; a command is stopped where it is.
    The training continues, and neither it nor any job has to be started again.

    Exits with 1 if an agent did not acknowledge it within 2 seconds, or a rank's note of where it is was damaged.
    """
    change(run, RunState.PAUSED, as_json)


def resume(run: Run, as_json: Json = False) -> None:
    """Fill again, from the next bubble, after pause, drain or kill.

    Exits with 1 if an agent did not acknowledge it within 2 seconds, or a rank's note of where it is was damaged.
    """
    change(run, RunState.RUNNING, as_json)


def drain(run: Run, as_json: Json = False) -> None:
    """Begin no further job on this node; running jobs continue to their end.

    Exits with 1 if an agent did not acknowledge it within 2 seconds, or a rank's note of where it is was damaged.
    """
    change(run, RunState.DRAINING, as_json)


def kill(run: Run, as_json: Json = False) -> None:
    """End all jobs on this node at once, and begin none until resume.

    They go back to the queue and resume from their last checkpoints later.

    Exits with 1 if an agent did not acknowledge it within 2 seconds, or a rank's note of where it is was damaged.
    """
    change(run, RunState.KILLED, as_json)


def status(run: Run, as_json: Json = False) -> None:
    """Show the state of each rank of a run on this node, and whether the training makes progress.

    If there was no progress for ten times the longest iteration, and half a minute at least, it prints since when, and
    which rank waits for which stage, or is stopped or gone.

    Exits with 1 if a rank's note of where it is was damaged.
    """
    _show(find_pages(run), as_json, find_standings(run))
    if _damaged(run):
        raise typer.Exit(1)


def change(run: Path, state: RunState, as_json: bool, wait_s: float = 2.0) -> None:
    """Put the ranks of a run on this node into a state, and show whether their agents acknowledge it in ``wait_s``."""
    pages = find_pages(run)
    for page in pages:  # all of them are open, so they change within microseconds of each other
        page.change(state)
    end_s = time.monotonic() + wait_s
    while any(page.silent for page in pages) and time.monotonic() < end_s:
        time.sleep(_LOOK_S)
    _show(pages, as_json)
    damaged = _damaged(run)
    if any(page.silent for page in pages) or damaged:
        raise typer.Exit(1)


def _damaged(run: Path) -> bool:
    """True if some ranks cannot be reached because their notes are damaged; prints a line for each."""
    lines = damaged_notes(run)
    for line in lines:
        typer.echo(line, err=True)
    return bool(lines)


def _show(pages: Sequence[ControlPage], as_json: bool, standings: Sequence[RankStanding] = ()) -> None:
    lines = stillness(standings)
    rows = [
        {
            "rank": page.rank,
            "pid": page.pid,
            "agent": page.agent if page.agent_lives else None,
            "state": page.state.name,
            "acknowledged": page.acknowledged,
        }
        for page in pages
    ]
    if as_json:
        print_json({"node": os.uname().nodename, "ranks": rows, "still": lines})
        return
    table = plain_table(">RANK", ">PID", ">AGENT", "STATE", "ACKNOWLEDGED")
    for page, row in zip(pages, rows, strict=True):
        heard = "yes" if row["acknowledged"] else "no" if row["agent"] else "-"
        agent = str(row["agent"] or ("gone" if page.agent else "starting"))
        table.add_row(str(row["rank"]), str(row["pid"]), agent, str(row["state"]), heard)
    console_of().print(table)
    for line in lines:
        typer.echo(line)

"""``pipefill gc``: removes what old trainings have left."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from megatron.fill.cli.options import Json, parsed, store_option
from megatron.fill.cli.views import print_json
from megatron.fill.display import counted, one_line, size
from megatron.fill.given.quantities import parse_duration

if TYPE_CHECKING:
    from megatron.fill.cli.leftovers import Left, Leftovers


def gc(
    runs: Annotated[list[Path], Argument(metavar="RUN...", help="Run folders, as the trainings printed them.")],
    older_than: Annotated[str, Option(metavar="AGE", help="How long nothing of it was used, such as 30d.")],
    store: Annotated[
        str | None, store_option("A store that the runs served and whose password they did not write down.")
    ] = None,
    dry_run: Annotated[
        bool, Option("--dry-run/--remove", help="Only say what would go, or remove it for good.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Say what old trainings have left and how much disk it takes; with --remove, remove it.

    A run goes as a whole if its training ended that long ago and no job that stays has its folder there. Of other runs
    go the folders, checkpoints and output of jobs that finished that long ago. The jobs' rows in their stores go with
    them. What waits or runs stays, a job that another one is after, and the newest job of each store.

    Exits with 1 if something could not be removed, or one of several folders is not that of a run: it is left as it is.
    """
    from megatron.fill.cli.leftovers import Leftovers

    found = Leftovers(runs, parsed("--older-than", older_than, parse_duration), store)
    with contextlib.closing(found):
        found.find()
        if not dry_run:
            found.remove()
    if as_json:
        print_json(_as_dict(found, dry_run))
    else:
        _print(found, dry_run)
    for failure in found.failures:
        typer.echo(f"pipefill: not removed: {failure}", err=True)
    if found.failures:
        raise typer.Exit(1)


def _as_dict(found: Leftovers, dry_run: bool) -> dict[str, object]:
    return {
        "dry_run": dry_run,
        "runs": [
            {
                "run": str(left.run),
                "whole": not left.stays,
                "stays": left.stays or None,
                "jobs": [job.name for _, job in left.jobs],
                "paths": {str(path): size_bytes for path, size_bytes in left.paths.items()},
                "size_bytes": left.size_bytes,
            }
            for left in found.runs
        ],
        "rows": {where: [job.id for job in jobs] for where, jobs in found.rows.items()},
        "size_bytes": sum(left.size_bytes for left in found.runs),
        "failures": found.failures,
    }


def _print(found: Leftovers, dry_run: bool) -> None:
    for left in found.runs:
        print(one_line(f"{left.run}: {_said(left)}"))
    jobs = counted(sum(map(len, found.rows.values())), "job")
    whole = f"{size(sum(left.size_bytes for left in found.runs))} and the rows of {jobs}"
    whole += f" in {counted(sum(map(bool, found.rows.values())), 'store')}"
    print(f"{whole} would go; --remove removes them for good" if dry_run else f"removed: {whole}")


def _said(left: Left) -> str:
    if not left.stays:
        return f"the whole run, {size(left.size_bytes)}"
    folders = f"{counted(len(left.jobs), 'folder')} of jobs"
    going = f"{folders}, {size(left.size_bytes)}" if left.jobs else "nothing"
    return f"{going}; the run stays: {left.stays}"

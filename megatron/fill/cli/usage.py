"""``pipefill usage``: the device time and money that jobs took, by user, job or run."""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from megatron.fill.cli.options import Json, Store, opened, parsed
from megatron.fill.cli.views import print_json
from megatron.fill.console import console_of, literal
from megatron.fill.display import one_line, plain_table
from megatron.fill.errors import ConfigError, FillError
from megatron.fill.given.quantities import parse_duration
from megatron.fill.store import Job
from megatron.fill.types import JobState

if TYPE_CHECKING:
    from megatron.fill.records.segment import Segment


class By(StrEnum):
    """The key that usage is summed by."""

    USER = "user"
    JOB = "job"
    RUN = "run"


@dataclass(slots=True)
class Used:
    """The usage of one user, job or run."""

    jobs: int = 0  # number of its jobs
    running: int = 0  # number of those that run now, as the setting ``quota`` counts them
    device_s: float = 0.0  # seconds inside steps, in bubbles or while no training had the device
    steps: int = 0
    # their part of the devices' energy, as far as it was counted; None if it was not at all
    joules: float | None = None
    cost: float | None = None  # their price, as far as it is known; None if it is not at all


def usage(
    store: Store = None,
    by: Annotated[By, Option(help="What to sum by.")] = By.USER,
    since: Annotated[
        str | None, Option(metavar="TIME", help="Only jobs that ended since or go on, such as 7d.")
    ] = None,
    price: Annotated[
        float | None,
        Option(
            metavar="P",
            min=0,
            max=1e9,
            help="What a device-hour costs.  [default: as the setting price of the jobs' runs says]",
        ),
    ] = None,
    as_json: Json = False,
    as_csv: Annotated[bool, Option("--csv", help="Print CSV, and nothing else.")] = False,
) -> None:
    """Show the device time that jobs took, their part of the devices' energy, and what it costs.

    The time is that inside steps, in bubbles and between trainings, of all attempts of a job; a job counts whole, and
    for the run that had it last.  The rows add up to the total.
    """
    if as_json and as_csv:
        raise ConfigError("--json and --csv exclude each other; expected one of them")
    span_s = None if since is None else parsed("--since", since, parse_duration)
    with opened(store) as opened_store:
        now_s = opened_store.now_s()
        first_s = None if span_s is None else now_s - span_s
        jobs = [job for job in opened_store.list() if _within(job, first_s)]
    segments = {run: _segment(run) for run in sorted({_run(job) for job in jobs})}
    prices = {run: _price(segment) if price is None else price for run, segment in segments.items()}
    quotas = {run: segment.quota for run, segment in segments.items() if segment is not None and segment.quota}
    name = {By.USER: lambda job: job.user or "-", By.JOB: lambda job: job.name, By.RUN: _run}[by]
    found = used(jobs, name, prices, now_s)
    total = used(jobs, lambda _: "all", prices, now_s).get("all", Used())
    if as_json:
        rows = [{by.value: name, **asdict(one)} for name, one in found.items()]
        limits = {run: asdict(quota) for run, quota in quotas.items()}
        print_json({"by": by, "rows": rows, "total": asdict(total), "quotas": limits})
    elif as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow([by.value, *asdict(total)])
        writer.writerows([one_line(name), *asdict(one).values()] for name, one in found.items())
    else:
        _print(by, [*found.items(), ("all", total)], total)
        for run, quota in quotas.items():
            print(one_line(f"quota of each user in {run}: {quota}"))
    unpriced = [job for job in jobs if prices[_run(job)] is None]
    if unpriced and total.cost is not None:
        without = f"{len(unpriced)} of {len(jobs)} jobs, whose runs have no setting price or are gone"
        typer.echo(f"pipefill: the cost lacks {without}; expected --price for them", err=True)


def _within(job: Job, first_s: float | None) -> bool:
    begun = job.progress.steps > 0 or job.state is JobState.RUNNING
    return begun and (first_s is None or job.finished_s is None or job.finished_s >= first_s)


def used(
    jobs: Iterable[Job], name: Callable[[Job], str], prices: Mapping[str, float | None], now_s: float
) -> dict[str, Used]:
    """Return the usage by the name that a job's time is booked on, most device time first, at the store's ``now_s``.

    ``prices`` are those of a device-hour by run folder, None where one is not known.
    """
    found: defaultdict[str, Used] = defaultdict(Used)
    for job in jobs:
        one = found[name(job)]
        one.jobs += 1
        one.running += job.state is JobState.RUNNING and not job.lost(now_s)
        one.device_s += job.progress.harvested_s
        one.steps += job.progress.steps
        one.joules = _sum((one.joules, job.progress.joules))
        price = prices[_run(job)]
        if price is not None:
            one.cost = _sum((one.cost, job.progress.harvested_s / 3600 * price))
    return dict(sorted(found.items(), key=lambda item: -item[1].device_s))


def _sum(values: Iterable[float | None]) -> float | None:
    """Return the sum of the values that are known; None if none is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _run(job: Job) -> str:
    """Return the folder of the run that had a job last; ``-`` if it is not known."""
    return job.run or "-"


def _segment(run: str) -> Segment | None:
    """Return the last segment of a run; None if it is not there."""
    from megatron.fill.records.segment import last_segment

    try:
        return last_segment(Path(run))
    except (FillError, OSError):
        return None


def _price(segment: Segment | None) -> float | None:
    """Return what a device-hour of a run costs by its setting ``price``; None if it has none or is not there."""
    return None if segment is None or segment.prices is None else segment.prices.main / segment.ranks


def _print(by: By, rows: Sequence[tuple[str, Used]], total: Used) -> None:
    extra = [name for name, value in ((">JOULES", total.joules), (">COST", total.cost)) if value is not None]
    table = plain_table(by.upper(), ">JOBS", ">RUNNING", ">DEVICE S", ">STEPS", *extra)
    for name, one in rows:
        cells = [str(one.jobs), str(one.running), f"{one.device_s:,.1f}", f"{one.steps:,}"]
        if total.joules is not None:
            cells.append("-" if one.joules is None else f"{one.joules:,.0f}")
        if total.cost is not None:
            cells.append("-" if one.cost is None else f"{one.cost:,.4f}")
        table.add_row(literal(name), *cells)
    console_of().print(table)

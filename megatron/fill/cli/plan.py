"""``pipefill plan``: plans of jobs for measured bubbles, without running anything."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from megatron.fill.cli.options import Json, Store, check_writable
from megatron.fill.cli.profile import stored_profiles
from megatron.fill.cli.schedule import Times, Transfer, given_costs
from megatron.fill.cli.views import print_json
from megatron.fill.console import console_of
from megatron.fill.display import plain_table
from megatron.fill.errors import ConfigError, PlanError
from megatron.fill.linux.files import replacing
from megatron.fill.pipeline.bubbles import bubble_cycle
from megatron.fill.pipeline.timeline import simulate
from megatron.fill.planner.draw import DrawnJob, Panel, draw_plans
from megatron.fill.planner.held import MARGIN_BYTES, held_cycle, leftover, packed_ns, room_bytes, why_no_memory
from megatron.fill.profiles import BubbleCycle, JobProfile

if TYPE_CHECKING:
    from megatron.fill.given.jobs import JobSpec

_PANELS = 24  # panels of a picture, at most


@dataclass(frozen=True, slots=True)
class _Row:
    """A job on a rank: its plan, or the reason why it has none."""

    rank: int
    cycle: BubbleCycle
    name: str
    job: DrawnJob | None = None
    tail: DrawnJob | None = None  # the other job that packs most into the tails
    packed: float = 0.0  # share of the rank's bubble time inside the job's nodes
    packed_with_tail: float = 0.0  # inside those of ``tail``, too
    error: str = ""


def plan(
    jobs: Annotated[Path, Argument(metavar="JOBS", help="A jobs file.")],
    bubbles: Annotated[Path | None, Option(metavar="FILE", help="What --fill-profile-only wrote.")] = None,
    schedule: Annotated[
        Path | None,
        Option(metavar="FILE", help="Instead of measured bubbles: a CSV file, docs/schedules.md; with --times."),
    ] = None,
    times: Times = "",
    transfer_ms: Transfer = 0.0,
    rank: Annotated[int | None, Option(metavar="N", help="Only this rank of the main job.")] = None,
    profiles: Annotated[Path | None, Option(metavar="FILE", help="JSON: a list of profiles per job name.")] = None,
    store: Store = None,
    margin_mib: Annotated[
        float,
        Option(
            "--memory-margin-mib",
            metavar="MIB",
            min=0,
            max=1e9,
            help="As --fill-memory-margin-mib; on a GPU 1024 more, for a worker's CUDA context.",
        ),
    ] = MARGIN_BYTES / 2**20,
    png: Annotated[Path | None, Option(metavar="FILE", help="Draw the plans into this file.")] = None,
    as_json: Json = False,
) -> None:
    """Show how jobs fit into a training's bubbles: per rank and job, the configuration with the most work.

    The bubbles are those that were measured, or those of a schedule, whose memory counts as free.

    A cycle is one iteration of the training; packed is the share of its bubble time inside the job's nodes, also with
    the other job that fits best into what is left. Exits with 1 if no job fits any rank.

    --json prints "without_profile", the names of jobs, and a list "plans" of: rank, job and error, or rank, job,
    configuration, iterations_per_cycle, work_per_cycle, packed, tail, packed_with_tail, work_per_s, plan, tail_plan.
    """
    from megatron.fill.given.jobs import distinct, load_jobs

    every = load_jobs(jobs)
    specs, cycles = distinct(every), _cycles(bubbles, schedule, times, transfer_ms)
    if rank is not None and rank not in cycles:
        raise ConfigError(f"--rank is {rank}: expected one of {', '.join(map(str, cycles))}")
    check_writable(png=png)
    known = _known_profiles(specs, profiles, store)
    found = {spec.name: its for spec in specs if (its := _of(spec, known))}
    caps = {spec.name: spec.memory for spec in specs}
    first = {spec.kind: spec.name for spec in specs}
    twins = {first[spec.kind]: spec.name for spec in reversed(every) if spec.name != first[spec.kind]}
    unknown = [spec.name for spec in specs if spec.name not in found]
    rows = [
        row
        for number, cycle in cycles.items()
        if rank in (None, number)
        for row in _plan_rank(number, cycle, int(margin_mib * 2**20), found, caps, twins)
    ]
    if as_json:
        print_json({"plans": [_as_dict(row) for row in rows], "without_profile": unknown})
    else:
        _print_rows(rows)
        if unknown:
            print(f"Without a profile: {', '.join(unknown)}; first run: {_profile(jobs, profiles, store)}")
    fitting = [row for row in rows if row.job]
    if png and fitting:
        panels = [Panel(f"rank {row.rank}", row.cycle, row.job, row.tail) for row in fitting if row.job]
        with replacing(png) as temporary:
            draw_plans(temporary, panels[:_PANELS])
        if len(panels) > _PANELS:
            typer.echo(f"{png} shows the first {_PANELS} of {len(panels)} plans; choose a rank with --rank", err=True)
    if not fitting:
        raise typer.Exit(1)


def _profile(jobs: Path, profiles: Path | None, store: str | None) -> str:
    from megatron.fill.store.location import shown

    option, where = ("--store", shown(store or "")) if profiles is None else ("--output", str(profiles))
    return shlex.join(["pipefill", "profile", str(jobs), option, where])


def _cycles(bubbles: Path | None, schedule: Path | None, times: str, transfer_ms: float) -> dict[int, BubbleCycle]:
    from megatron.fill.pipeline.torch_csv import load_csv
    from megatron.fill.planner.files import NOT_MEASURED, load_cycles

    if schedule is not None and bubbles is None:
        if not times:
            raise ConfigError(f"--schedule {schedule} without --times: expected both")
        its = load_csv(schedule)
        timeline = simulate(its, given_costs(its, times, transfer_ms))
        return {rank: bubble_cycle(timeline, rank, NOT_MEASURED) for rank in range(its.stages)}
    if bubbles is None or schedule is not None:
        raise ConfigError("expected the bubbles of a training: --bubbles FILE, or --schedule FILE, and not both")
    for option, given in (("--times", times), ("--transfer", transfer_ms)):
        if given:
            raise ConfigError(f"{option} is {given}: expected none with --bubbles, which were measured")
    if cycles := load_cycles(bubbles):
        return cycles
    raise ConfigError(f"{bubbles}: ranks is empty: expected the bubbles of at least one rank")


def _of(spec: JobSpec, known: Mapping[str, Sequence[JobProfile]]) -> Sequence[JobProfile]:
    """Return a job's profiles, by its own name or, for the first instance of a job with a count, without its ``-0``."""
    return known.get(spec.name) or known.get(spec.name.removesuffix("-0")) or ()


def _known_profiles(
    specs: Sequence[JobSpec], path: Path | None, store: str | None
) -> Mapping[str, Sequence[JobProfile]]:
    from megatron.fill.planner.files import load_profiles

    if path is not None:
        return load_profiles(path)
    if store is not None:
        return stored_profiles(specs, store)
    raise ConfigError("no profiles given; expected --profiles FILE, or --store after pipefill profile JOBS")


def _plan_rank(
    rank: int,
    cycle: BubbleCycle,
    margin_bytes: int,
    profiles: Mapping[str, Sequence[JobProfile]],
    caps: Mapping[str, int | None],
    twins: Mapping[str, str],
) -> list[_Row]:
    """Plan a rank's bubbles as the runtime does: with its reserve, and within the limits of a worker's memory.

    These are each bubble's free memory less the margin, and the ``caps`` that jobs ask for.  ``twins`` has the second
    job of each kind that has one, by the name of the first.
    """
    rows = []
    held = held_cycle(cycle, room_bytes(cycle, margin_bytes))
    for name, its_profiles in profiles.items():
        try:
            job = _planned(name, cycle, margin_bytes, its_profiles, caps[name])
        except PlanError as error:
            rows.append(_Row(rank, cycle, name, error=str(error)))
            continue
        packed = packed_ns(job.plan, job.profile) / cycle.bubble_ns
        rest = leftover(held, job.plan, job.profile, caps[name])
        best: tuple[float, DrawnJob | None] = (0.0, None)
        for other in profiles:
            if other == name and name not in twins:
                continue
            with suppress(PlanError):
                label = twins[name] if other == name else other
                tail = _planned(label, rest, 0, profiles[other], caps[other])
                share = packed_ns(tail.plan, tail.profile) / job.plan.cycles / cycle.bubble_ns
                best = max(best, (share, tail), key=lambda found: found[0])
        rows.append(_Row(rank, cycle, name, job, best[1], packed, packed + best[0]))
    return rows


def _planned(
    name: str, cycle: BubbleCycle, margin_bytes: int, profiles: Sequence[JobProfile], cap_bytes: int | None
) -> DrawnJob:
    from megatron.fill.planner.search import plan_job

    if cycle.slots and (reason := why_no_memory(room_bytes(cycle, 0), margin_bytes, cap_bytes)):
        raise PlanError(reason)
    found = plan_job(held_cycle(cycle, room_bytes(cycle, margin_bytes)), profiles, cap_bytes)
    return DrawnJob(name, found, next(its for its in profiles if its.configuration == found.configuration))


def _rate(cycle: BubbleCycle, job: DrawnJob) -> float:
    """Return the work per second of wall time."""
    return job.plan.work_per_cycle / (cycle.period_ns / 1e9)


def _as_dict(row: _Row) -> dict[str, Any]:
    head = {"rank": row.rank, "job": row.name}
    if row.job is None:
        return head | {"error": row.error}
    found = row.job.plan
    return head | {
        "configuration": str(found.configuration),
        "iterations_per_cycle": found.iterations / found.cycles,
        "work_per_cycle": found.work_per_cycle,
        "packed": row.packed,
        "tail": row.tail.name if row.tail else None,
        "packed_with_tail": row.packed_with_tail,
        "work_per_s": _rate(row.cycle, row.job),
        "plan": found.to_dict(),
        "tail_plan": row.tail.plan.to_dict() if row.tail else None,
    }


def _print_rows(rows: Sequence[_Row]) -> None:
    from rich.markup import escape

    fitting = [row for row in rows if row.job]
    if fitting:
        numbers = (">ITERATIONS", ">WORK PER\nCYCLE", ">PACKED")
        table = plain_table(">RANK", "JOB", "CONFIGURATION", *numbers, "WITH A\nTAIL JOB", ">WORK/S", gap=1)
        for at, width in ((1, 10), (2, 13), (6, 8)):
            table.columns[at].min_width = width
        for row in fitting:
            if row.job:
                tail = f"{row.packed_with_tail:.1%}\n{row.tail.name}" if row.tail else "-"
                table.add_row(
                    str(row.rank),
                    escape(row.name),
                    str(row.job.plan.configuration).replace("+", "\n+"),
                    _iterations(row.job.plan.iterations / row.job.plan.cycles),
                    f"{row.job.plan.work_per_cycle:.4g}",
                    f"{row.packed:.1%}",
                    escape(tail),
                    f"{_rate(row.cycle, row.job):.4g}",
                )
        console_of().print(table)
    for row in rows:
        if row.error:
            print(f"rank {row.rank}: {row.name}: {row.error}")


def _iterations(per_cycle: float) -> str:
    return f"{per_cycle:.3g} a cycle" if per_cycle >= 1 else f"1 in {1 / per_cycle:.3g}"

"""Fill jobs that come and wait, by policy: parts of ``sim_pipefill.py`` on the simulated cluster.

The main job is the 5B one on 128 GPUs, with one fill job per GPU.  Load is the size of the jobs that come, as a share
of what the bubbles can do.  All policies get the same jobs, of the kinds that fit the bubbles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from megatron.fill.wings.sim.cluster.rates import Rates
from megatron.fill.wings.sim.cluster.simulate import simulate
from megatron.fill.wings.sim.filljobs.catalog import catalog_kinds
from megatron.fill.wings.sim.filljobs.generate import Generator, fill_capacity, generate
from megatron.fill.wings.sim.filljobs.trace import load_trace
from megatron.fill.wings.sim.sweep import run_all
from megatron.fill.wings.sim.values import FillKind, MainJobRun, RuntimeModel, Scenario, SimJob, SimOutcome
from scripts.benchmarks.studies.bubbles import physical_job

DAY_S, HOUR_S = 86400.0, 3600.0
_MEANS = ("mean_s", "median_s", "p99_s", "makespan_s", "deadlines_met")
LOADS = (0.5, 0.9, 1.1)
SEEDS = (0, 1, 2)  # all figures are means over these
POLICIES = ("fifo", "sjf", "makespan", "deadline", "fair")
ARRIVALS = ("even", "daily", "hourly")
TRACE_LOAD, TRACE_DAYS = 1.0, 7
UNTIL_S = 60 * DAY_S  # all jobs are done long before

# Sizes as in published studies: a few long jobs have most of the work.  Assumed.
SIZES = Generator(per_hour=1.0, median_s=600.0, sigma=1.5, cap_s=4 * HOUR_S, deadline_share=1.0, users=8)
# Microsoft's Philly trace (Jeon et al., ATC 2019): the runtimes of 83,154 jobs that Alibaba's notebook compares with
# its own (github.com/alibaba/clusterdata at 7a6c496, cluster-trace-gpu-v2020/analysis/philly_runtime.csv) have a median
# of 1,186 s, and their logarithms a standard deviation of 2.18.  Assumed: the cap, and that a fill job has one GPU.
# Alibaba's PAI trace (Weng et al., NSDI 2022): the medians of the tasks submitted in each hour of the day, read off a
# figure of that notebook, have a first harmonic of 0.25 times their mean, with its peak at 14.8 h.
PHILLY = replace(SIZES, median_s=1186.0, sigma=2.18, cap_s=2 * DAY_S, deadline_share=0.0)
PAI_DAILY, PAI_PEAK_S = 0.25, 14.8 * HOUR_S


@dataclass(frozen=True, slots=True)
class Case:
    """One simulation.

    Attributes:
        arrivals: *even*, *daily* as in Alibaba's trace, or *hourly*: the same, and those of an hour come at its start.
        trace: a CSV file to play instead of made-up jobs.
    """

    policy: str
    load: float
    generator: Generator
    duration_s: float
    runtime: RuntimeModel
    arrivals: str = "even"
    trace: Path | None = None
    seed: int = 0


def policies(runtime: RuntimeModel) -> list[dict[str, Any]]:
    """A day of arrivals, at several loads."""
    return play_all([Case(policy, load, SIZES, DAY_S, runtime) for load in LOADS for policy in POLICIES])


def traces(runtime: RuntimeModel, trace: Path | None) -> list[dict[str, Any]]:
    """Three days with the shape of published traces, or a trace of one's own."""
    arrivals = ("trace",) if trace else ARRIVALS
    cases = [
        Case(policy, TRACE_LOAD, PHILLY, TRACE_DAYS * DAY_S, runtime, one, trace)
        for one in arrivals
        for policy in POLICIES
        if policy != "deadline"  # no trace has any
    ]
    return play_all(cases)


def play_all(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Each case with every seed, a trace once: the means of its figures, and how many jobs there were in all."""
    many = [replace(case, seed=seed) for case in cases for seed in (SEEDS[:1] if case.trace else SEEDS)]
    rows: list[dict[str, Any]] = run_all(play, many)
    each = len(rows) // len(cases)
    return [mean_row(rows[at : at + each]) for at in range(0, len(rows), each)]


def mean_row(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of rows of the same case."""
    means = {
        name: None if any(row[name] is None for row in rows) else fmean(row[name] for row in rows) for name in _MEANS
    }
    return rows[0] | means | {name: sum(row[name] for row in rows) for name in ("jobs", "unfinished")}


def play(case: Case) -> dict[str, Any]:
    """Simulate until all jobs are done."""
    job = physical_job()
    kinds, groups = catalog_kinds(job.gpu), job.groups()
    capacity = fill_capacity(groups, kinds, runtime=case.runtime)
    fitting = {name for group in groups for name in Rates(group.cycle, kinds, case.runtime).whole.fits}
    some = [kind for kind in kinds if kind.name in fitting]
    jobs = load_trace(case.trace, kinds) if case.trace else made_up(case, some, capacity)
    run = MainJobRun(job.name, groups)
    scenario = Scenario((run,), kinds, jobs, UNTIL_S, case.policy, replace(case.runtime, tail=False))
    return {
        "policy": case.policy,
        "arrivals": case.arrivals,
        "load": None if case.trace else case.load,
        "capacity_gpus": capacity,
        **completions(jobs, simulate(scenario)),
    }


def made_up(case: Case, kinds: Sequence[FillKind], capacity: float) -> tuple[SimJob, ...]:
    """As many jobs as the load says, on average."""
    generator = replace(case.generator, seed=case.seed, per_hour=case.load * capacity / case.generator.mean_s * HOUR_S)
    if case.arrivals != "even":
        generator = replace(generator, daily=PAI_DAILY, peak_s=PAI_PEAK_S)
    jobs = generate(generator, kinds, case.duration_s)
    return by_the_hour(jobs) if case.arrivals == "hourly" else jobs


def by_the_hour(jobs: Sequence[SimJob]) -> tuple[SimJob, ...]:
    """All jobs of an hour at its start, as timed submissions come."""
    return tuple(replace(job, arrival_s=job.arrival_s // HOUR_S * HOUR_S) for job in jobs)


def completions(jobs: Sequence[SimJob], outcome: SimOutcome) -> dict[str, Any]:
    """Seconds from arrival to the end, and from the first arrival to the last end; None where none ended."""
    ended = [(job, its.ended_s) for job, its in zip(jobs, outcome.jobs, strict=True) if its.ended_s is not None]
    times = [end_s - job.arrival_s for job, end_s in ended]
    due = sum(job.deadline_s is not None for job in jobs)
    met = sum(job.deadline_s is not None and end_s <= job.deadline_s for job, end_s in ended)
    return {
        "jobs": len(jobs),
        "unfinished": len(jobs) - len(ended),
        "mean_s": float(np.mean(times)) if times else None,
        "median_s": float(np.median(times)) if times else None,
        "p99_s": float(np.percentile(times, 99)) if times else None,
        "makespan_s": max(end_s for _, end_s in ended) - min(job.arrival_s for job in jobs) if ended else None,
        "deadlines_met": met / due if due else None,
    }

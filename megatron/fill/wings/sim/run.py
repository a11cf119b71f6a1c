"""Simulations and their results, from a configuration file or a real run's report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron.fill.device.meter import fingerprint
from megatron.fill.errors import ConfigError
from megatron.fill.given.files import read_yaml
from megatron.fill.given.plainyaml import PlainYaml
from megatron.fill.given.problems import explain, shown
from megatron.fill.report import REPORT
from megatron.fill.scheduler.policies import parse_policy
from megatron.fill.wings.sim.cluster.simulate import simulate
from megatron.fill.wings.sim.config import FillConfig, SimulationConfig
from megatron.fill.wings.sim.filljobs.catalog import catalog_kinds, measured_kinds
from megatron.fill.wings.sim.filljobs.generate import generate
from megatron.fill.wings.sim.filljobs.jobs import jobs_from_file, jobs_from_store
from megatron.fill.wings.sim.filljobs.trace import load_trace
from megatron.fill.wings.sim.filljobs.whatif import jobs_without_end, kinds_of_report, measured
from megatron.fill.wings.sim.results import SimResult, summarise
from megatron.fill.wings.sim.sweep import Sweep, variants
from megatron.fill.wings.sim.values import FillKind, MainJobRun, Scenario, SimJob

_WHAT_IF = "1d"  # simulated time for a real run's report


@dataclass(frozen=True, slots=True)
class SimTask:
    """A simulation as data that can be sent to another process."""

    source: str  # the configuration file, for errors; paths in it are relative to its folder
    config: SimulationConfig
    policy: str
    what: dict[str, Any]  # swept values


def load(path: Path) -> tuple[str, PlainYaml]:
    """Read a configuration file: its name and unchecked content; ConfigError, with the line, if it is invalid."""
    read = read_yaml(path, "a YAML file")
    if not isinstance(read.value, dict):
        raise ConfigError(f"{path}: found {shown(read.value)}; expected a mapping with main_jobs and fill")
    return str(path), read


def from_report(report: Path, gpus: int | None) -> tuple[str, PlainYaml, list[str]]:
    """Return the configuration that scales a real run up, with its bubbles and an endless supply of its jobs.

    So much of a plan's work counts that the recorded devices harvest what the run did while it had jobs.

    Args:
        report: its ``report.json``, or the run folder with it.
        gpus: number of GPUs; None for the recorded number.

    Returns:
        Its name, the configuration, and lines that say what is assumed.

    Raises:
        ConfigError: there is no such run, or it cannot be simulated.
    """
    report = report / REPORT if report.is_dir() else report
    if not report.exists():
        expected = "the folder of a run with jobs, or its report.json; other runs' bubbles.json is for CONFIG.yaml"
        raise ConfigError(f"{report}: cannot be read: it is not there; expected {expected}")
    path = str(report.resolve())
    recorded: dict[str, Any] = {
        "duration": _WHAT_IF,
        "main_jobs": [{"name": "main", "report": path}],
        "fill": {"report": path, "saturate": True},
    }
    (task,) = plan_runs(str(report), PlainYaml(recorded), (), (), None)
    planned = run_one(task).total
    harvest, bubble_share = measured(report)
    runtime = {}
    notes = []
    if harvest is None:
        notes.append("The report has no harvest; assumed: all work of a plan is done.")
    elif planned.fill > 0 and planned.bubble:
        of_plan = planned.fill / planned.bubble
        runtime["harvest"] = min(1.0, harvest / of_plan)
        notes.append(
            f"Assumed: with a job always there, bubbles are harvested as in the run: {harvest:.1%}, "
            f"where the planner's estimate is {of_plan:.1%}."
        )
    if bubble_share is not None and planned.bubble is not None:
        notes.append(
            f"Bubbles are {bubble_share:.1%} of all of the run's iterations; of the usual ones, which are "
            f"repeated here, {planned.bubble:.1%}."
        )
    main = recorded["main_jobs"][0] | ({} if gpus is None else {"gpus": gpus})
    return str(report), PlainYaml(recorded | {"main_jobs": [main], "runtime": runtime}), notes


def plan_runs(
    source: str, read: PlainYaml, sweeps: Sequence[Sweep], policies: Sequence[str], price: float | None
) -> list[SimTask]:
    """Return all requested simulations, checked, so that none runs if any of them has an invalid value.

    Policies and price, if given, are instead of the file's.  ConfigError, with file, line, field, value and what was
    expected, if a value is invalid.
    """
    data = read.value if price is None else read.value | {"price_per_gpu_hour": price}
    tasks = []
    for what, changed in variants(data, sweeps):
        config = _checked(source, read, changed, what)
        for policy in policies or config.policies:
            parse_policy(policy)
            tasks.append(SimTask(source, config, policy, what))
    return tasks


def run_one(task: SimTask) -> SimResult:
    """Run a simulation; ConfigError if a file named in the configuration cannot be used, or a policy failed."""
    try:
        scenario = _scenario(task, Path(task.source).resolve().parent)
    except ValueError as error:
        raise ConfigError(f"{task.source}: {error}") from error
    return summarise(scenario, simulate(scenario), task.config.price_per_gpu_hour, task.what)


def _scenario(task: SimTask, folder: Path) -> Scenario:
    """Return the scenario of a simulation; ValueError if a kind of job is not compatible with the rest."""
    config = task.config
    runs = tuple(job.run(folder) for job in config.main_jobs)
    kinds, jobs = _fill(config, runs, folder)
    return Scenario(
        main_jobs=runs,
        kinds=kinds,
        jobs=jobs,
        duration_s=config.duration,
        policy=task.policy,
        runtime=config.runtime.model(),
        failures=config.failures.model(),
    )


def _fill(
    config: SimulationConfig, runs: Sequence[MainJobRun], folder: Path
) -> tuple[tuple[FillKind, ...], tuple[SimJob, ...]]:
    fill = config.fill
    if fill.store is not None:
        return jobs_from_store(fill.store, fingerprint(fill.device), fill.replay)
    kinds = _chosen(fill, _known_kinds(config, folder))
    if fill.trace is not None:
        return kinds, load_trace(folder / fill.trace, kinds)
    if fill.jobs is not None:
        return jobs_from_file(folder / fill.jobs, kinds, fill.size)
    groups = [group for run in runs for group in run.groups]
    if fill.generate is not None:
        return kinds, generate(fill.generate, kinds, config.duration, groups, config.runtime.model())
    devices = sum(group.count for group in groups)
    return kinds, jobs_without_end(kinds, devices, config.duration)


def _known_kinds(config: SimulationConfig, folder: Path) -> tuple[FillKind, ...]:
    fill = config.fill
    if fill.profiles is not None:
        return measured_kinds(folder / fill.profiles)
    if fill.report is not None:
        return kinds_of_report(folder / fill.report)
    gpu = fill.gpu or next((job.gpu for job in config.main_jobs if job.gpu is not None), None)
    if gpu is None:
        raise ConfigError("fill: expected profiles, report, or gpu: no main job says which GPU's catalog to take")
    return catalog_kinds(gpu)


def _chosen(fill: FillConfig, known: Iterable[FillKind]) -> tuple[FillKind, ...]:
    by_name = {kind.name: kind for kind in known}
    for name in fill.kinds or ():
        if name not in by_name:
            raise ConfigError(f"fill.kinds has {name!r}; expected some of {', '.join(by_name)}")
    return tuple(by_name[name] for name in fill.kinds or by_name)


def _checked(source: str, read: PlainYaml, data: dict[str, Any], what: dict[str, Any]) -> SimulationConfig:
    """Validate ``data``, the file's content with the swept values ``what``."""
    try:
        return SimulationConfig.model_validate(data)
    except ValidationError as error:
        swept = ", ".join(f"{field}={value}" for field, value in what.items())
        suffix = f" (with {swept})" if swept else ""
        raise ConfigError(
            explain(error, SimulationConfig, lambda place: (read.placed(source, place), place), suffix)
        ) from error

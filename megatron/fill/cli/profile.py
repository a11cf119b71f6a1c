"""``pipefill profile``: measure jobs by themselves, before or without a training."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron.fill.cli.options import Device, Json, Store, checked_device, opened
from megatron.fill.cli.trial import trial_folder, trials_of
from megatron.fill.display import harmless
from megatron.fill.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from megatron.fill.config import JobSpec
    from megatron.fill.profiles import JobProfile, MeasuredJob
    from megatron.fill.trial.result import Trial

_PLAIN_S = 3.0  # of bubbles, for a job without nodes


class NoNodes(ConfigError):
    """A plain side task: it is measured by running it."""


def profile(
    jobs: Annotated[Path, typer.Argument(metavar="JOBS", help="A jobs file.")],
    device: Device = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the profiles here, for pipefill plan.")
    ] = None,
    store: Store = None,
    as_json: Json = False,
) -> None:
    """Measure jobs: the time and the peak memory of each node, in each configuration.

    Jobs without nodes are run for a few seconds as "try" runs them: of a plain side task the steps are measured, of a
    command its memory. The device should have nothing else to do. Exits with 1 if a job could not be measured.

    With --store the profiles of jobs with nodes are kept there, and a training that serves it needs not measure these
    jobs in its bubbles.

    --json prints, per job name, the list of its profiles: configuration, work per iteration, and nodes. Those of a
    plain side task are one profile with one node, its step. Commands, which have no steps, are left out.
    """
    from megatron.fill.config import load_jobs

    where = checked_device(device)
    search = [str(jobs.resolve().parent), os.getcwd()]
    found: dict[str, MeasuredJob] = {}
    plain, failures = [], {}
    specs = load_jobs(jobs)
    for spec in specs:
        twin = next((found[one.name] for one in specs if one.name in found and _same(one, spec)), None)
        try:
            found[spec.name] = twin or _measure(spec, search, where)
        except NoNodes:
            plain.append(spec)
        except ConfigError as error:
            failures[spec.name] = str(error)
    trials = _run_plain(plain, search, where)
    failures |= {name: trial.reason for name, trial in trials.items() if trial.reason}
    if store is not None:
        _keep(store, specs, found, where)
    profiles = {name: measured.to_dict()["configurations"] for name, measured in found.items()}
    profiles |= {name: [step.to_dict()] for name, trial in trials.items() if (step := _step_of(trial)) is not None}
    if output is not None:
        try:
            output.write_text(json.dumps(profiles) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{output}: cannot be written: {error.strerror}") from error
    if as_json:
        print(json.dumps(profiles, indent=2))
    else:
        _print(found, {name: trial for name, trial in trials.items() if not trial.reason})
    for name, reason in failures.items():
        print(f"{name}: not measured: {reason}", file=sys.stderr)
    if failures:
        raise typer.Exit(1)


def _run_plain(specs: Sequence[JobSpec], search: Sequence[str], device: str) -> dict[str, Trial]:
    """What came of running each of these jobs, by name; those that are alike are run once."""
    from megatron.fill.trial.check import distinct, kind_of
    from megatron.fill.trial.result import Options

    if not specs:
        return {}
    first = distinct(specs)
    options = Options(seconds=_PLAIN_S, device=device, round_trip=False)
    with trial_folder(None) as folder:
        trials = list(trials_of(first, search, options, folder, False, lambda line: print(line, file=sys.stderr)))
    by_kind = {kind_of(spec): trial for spec, trial in zip(first, trials, strict=True)}
    return {spec.name: by_kind[kind_of(spec)] for spec in specs}


def _step_of(trial: Trial) -> JobProfile | None:
    """A plain side task as a list of one node; None where no step or no work was seen."""
    from megatron.fill.profiles import Configuration, JobProfile, NodeProfile

    if trial.reason or trial.steps is None or not trial.work_done:
        return None
    step = NodeProfile("step", round(trial.steps.p50_ms * 1e6), trial.peak_bytes)
    return JobProfile(Configuration(), (step,), trial.work_done / trial.steps.count)


def stored_profiles(specs: Sequence[JobSpec], where: str) -> Mapping[str, Sequence[JobProfile]]:
    """The profiles that a store has of these jobs on a device like this machine's, by job name."""
    from megatron.fill.device.meter import default_device, fingerprint
    from megatron.fill.profiles import MeasuredJob

    found = {}
    mark = fingerprint(default_device())
    with opened(where) as store:
        for spec in specs:
            content = store.profile(_key(spec, mark))
            if content is not None:
                with contextlib.suppress(ValueError):  # one that makes no sense is none
                    found[spec.name] = MeasuredJob.from_dict(content).profiles
    return found


def _same(one: JobSpec, other: JobSpec) -> bool:
    return (one.task, one.args, one.memory) == (other.task, other.args, other.memory)


def _key(spec: JobSpec, mark: str) -> str:
    from megatron.fill.profiles import profile_key
    from megatron.fill.store.submit import new_job

    return profile_key(new_job(spec, [], "").spec, mark)


def _measure(spec: JobSpec, search: list[str], device: str) -> MeasuredJob:
    """Measure a job with nodes.

    Raises:
        NoNodes: it has none.
        ConfigError: it cannot be measured.
    """
    if spec.task is None:
        raise NoNodes(spec.name)
    from megatron.fill.hearsay import read_json
    from megatron.fill.profiles import MeasuredJob
    from megatron.fill.runtime.guest import LIBRARY_SETTINGS
    from megatron.fill.runtime.measure import NO_NODES, MeasureSpec
    from megatron.fill.runtime.profiler import PROFILE

    with tempfile.TemporaryDirectory(prefix="pipefill-profile-") as folder:
        measured = MeasureSpec(spec.name, spec.task, spec.args, spec.memory, search, device, folder)
        path = Path(folder) / "spec.json"
        path.write_text(measured.to_json(), encoding="utf-8")
        print(f"measuring {spec.name} on {device}", file=sys.stderr)
        done = subprocess.run(
            [sys.executable, "-m", "megatron.fill.runtime.measure", str(path)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=os.environ | LIBRARY_SETTINGS,
            check=False,
        )
        if done.returncode:
            error = NoNodes if done.returncode == NO_NODES else ConfigError
            raise error((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
        try:
            return MeasuredJob.from_dict(read_json(Path(folder) / PROFILE))
        except (OSError, ValueError) as error:
            raise ConfigError(f"what it measured cannot be read: {error}") from error


def _keep(where: str, specs: Sequence[JobSpec], found: Mapping[str, MeasuredJob], device: str) -> None:
    from megatron.fill.device.meter import fingerprint

    mark = fingerprint(device)
    with opened(where, create=True) as store:
        for spec in specs:
            if spec.name in found:
                store.keep_profile(_key(spec, mark), found[spec.name].to_dict())


def _print(found: Mapping[str, MeasuredJob], trials: Mapping[str, Trial]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("JOB", overflow="fold", min_width=8)
    table.add_column("CONFIGURATION", overflow="fold", min_width=13)
    for heading in ("NODES", "LONGEST\nMS", "ITERATION\nMS", "WORK/S\nALONE", "PEAK\nMIB"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, measured in found.items():
        for one in measured.profiles:
            table.add_row(
                escape(name),
                str(one.configuration),
                str(len(one.nodes)),
                f"{max(node.duration_ns for node in one.nodes) / 1e6:.1f}",
                f"{one.duration_ns / 1e6:.1f}",
                f"{one.work / max(1, one.duration_ns) * 1e9:.4g}",
                f"{one.memory_bytes / 2**20:.0f}",
            )
    if found:
        console.print(table)
    for name, measured in found.items():
        if measured.split:
            print(f"{name}: {harmless(measured.split)}")
    if trials:
        console.print(_steps_table(trials))


def _steps_table(trials: Mapping[str, Trial]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("JOB", overflow="fold", min_width=8)
    for heading in ("STEPS", "P50\nMS", "P99\nMS", "LONGEST\nMS", "PEAK\nMIB"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, trial in trials.items():
        steps, peak = trial.steps, f"{trial.peak_bytes / 2**20:.0f}"
        times = ["-"] * 4
        if steps is not None:
            times = [f"{steps.count}", *(f"{ms:.2f}" for ms in (steps.p50_ms, steps.p99_ms, steps.longest_ms))]
        table.add_row(escape(name), *times, peak)
    return table

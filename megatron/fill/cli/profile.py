"""``pipefill profile``: measures jobs by themselves, before or without a training."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from megatron.fill.agent.admission import LIBRARY_SETTINGS
from megatron.fill.cli.options import Device, Json, Store, check_writable, checked_device, opened
from megatron.fill.cli.trial import trial_folder, trials_of
from megatron.fill.cli.views import print_json
from megatron.fill.console import console_of, harmless, literal
from megatron.fill.device.meter import default_device, fingerprint
from megatron.fill.display import plain_table
from megatron.fill.errors import ConfigError
from megatron.fill.folders import PROFILE
from megatron.fill.linux.files import write_text
from megatron.fill.profiles import Configuration, JobProfile, MeasuredJob, NodeProfile
from megatron.fill.trial.result import Options, Trial
from megatron.fill.trial.steptimes import STEP_TIMES, KindTimes
from megatron.fill.untrusted import read_json

if TYPE_CHECKING:
    from rich.table import Table

    from megatron.fill.given.jobs import JobSpec

_RUN_S = 3.0  # seconds of bubbles for a job that is one long run
_PAUSE = "pause()"


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurement of a job by itself; ``kinds`` has the step times of a plain side task."""

    job: MeasuredJob
    kinds: tuple[KindTimes, ...] = ()


def profile(
    jobs: Annotated[Path, Argument(metavar="JOBS", help="A jobs file.")],
    device: Device = None,
    output: Annotated[
        Path | None, Option("--output", "-o", metavar="FILE", help="Write the profiles here, for pipefill plan.")
    ] = None,
    store: Store = None,
    as_json: Json = False,
) -> None:
    """Measure jobs: the time and the peak memory of each node, in each configuration.

    Of a plain side task each kind of step is measured, 3 s of steps in all. Commands and imperative tasks are run for
    3 s of bubbles as "try" runs them, and what is measured is their memory and the time that a pause takes. The device
    should have nothing else to do. Exits with 1 if a job could not be measured.

    With --store the profiles are kept there. A training that serves it needs not measure the nodes of these jobs in its
    bubbles, knows how long the first steps of the others take, and starts none that would not fit.

    --json prints, per job name, the list of its profiles: configuration, work per iteration, and nodes. Those of a
    plain side task are one profile with a node for each kind of step; those of a command or an imperative task one with
    a node that takes as long as a pause.
    """
    from megatron.fill.given.jobs import load_jobs

    where = checked_device(device)
    search = [str(jobs.resolve().parent), os.getcwd()]
    found: dict[str, Measured] = {}
    runs, failures = [], {}
    specs = load_jobs(jobs)
    check_writable(output=output)
    if store is not None:
        with opened(store, create=True):
            pass  # a store that cannot be opened is reported before the measurements
    for spec in specs:
        twin = next((found[one.name] for one in specs if one.name in found and one.kind == spec.kind), None)
        try:
            if measured := twin or _measure(spec, search, where):
                found[spec.name] = measured
            else:
                runs.append(spec)
        except ConfigError as error:
            failures[spec.name] = str(error)
    trials = _run(runs, search, where)
    failures |= {name: trial.reason for name, trial in trials.items() if trial.reason}
    trials = {name: trial for name, trial in trials.items() if not trial.reason}
    jobs_measured = {name: measured.job for name, measured in found.items()}
    jobs_measured |= {name: _as_job(trial) for name, trial in trials.items()}
    if store is not None:
        _keep(store, specs, jobs_measured, where)
    profiles = {name: job.to_dict()["configurations"] for name, job in jobs_measured.items()}
    if output is not None:
        write_text(output, json.dumps(profiles) + "\n")
    if as_json:
        print_json(profiles)
    else:
        _print(found, trials)
    for name, reason in failures.items():
        print(f"{name}: not measured: {reason}", file=sys.stderr)
    if failures:
        raise typer.Exit(1)


def _run(specs: Sequence[JobSpec], search: Sequence[str], device: str) -> dict[str, Trial]:
    """Run equal jobs once, and return the trials by name."""
    from megatron.fill.given.jobs import distinct

    if not specs:
        return {}
    first = distinct(specs)
    options = Options(seconds=_RUN_S, device=device, round_trip=False)
    with trial_folder(None) as folder:
        trials = list(trials_of(first, search, options, folder, False, lambda line: print(line, file=sys.stderr)))
    by_kind = {spec.kind: trial for spec, trial in zip(first, trials, strict=True)}
    return {spec.name: by_kind[spec.kind] for spec in specs}


def _as_job(trial: Trial) -> MeasuredJob:
    """Return a profile with one node for a job that is one long run: a bubble must be at least as long as its pause."""
    duration_ns = max(1, round(trial.callbacks_ms.get(_PAUSE, 0.0) * 1e6))
    ran_s = trial.use.used * trial.use.bubbles * trial.bubble_ms / 1e3 if trial.use is not None else 0.0
    per_s = trial.work_done / ran_s if trial.work_done and ran_s else 1.0
    node = NodeProfile("pause", duration_ns, trial.peak_bytes)
    return MeasuredJob((JobProfile(Configuration(), (node,), per_s * duration_ns / 1e9),), trial.total_work)


def stored_profiles(specs: Sequence[JobSpec], where: str) -> Mapping[str, Sequence[JobProfile]]:
    """Return a store's profiles of these jobs on a device like this machine's, by job name."""
    found = {}
    mark = fingerprint(default_device())
    with opened(where) as store:
        for spec in specs:
            content = store.profile(_key(spec, mark))
            if content is not None:
                with contextlib.suppress(ValueError):  # invalid profiles are ignored
                    found[spec.name] = MeasuredJob.from_dict(content).profiles
    return found


def _key(spec: JobSpec, mark: str) -> str:
    return spec.to_submit([], "").work.profile_key(mark)


def _measure(spec: JobSpec, search: list[str], device: str) -> Measured | None:
    """Measure a job by itself; None for a command or imperative task, ConfigError if it cannot be measured."""
    if spec.task is None:
        return None
    from megatron.fill.trial.measure import NO_STEPS, MeasureSpec

    with tempfile.TemporaryDirectory(prefix="pipefill-profile-") as folder:
        measured = MeasureSpec(spec.name, spec.to_submit(search, "").work, device, folder)
        path = Path(folder) / "spec.json"
        path.write_text(measured.to_json(), encoding="utf-8")
        print(f"measuring {spec.name} on {device}", file=sys.stderr)
        done = subprocess.run(
            [sys.executable, "-m", "megatron.fill.trial.measure", str(path)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=os.environ | LIBRARY_SETTINGS,
            check=False,
        )
        if done.returncode == NO_STEPS:
            return None
        if done.returncode:
            raise ConfigError((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
        try:
            job = MeasuredJob.from_dict(read_json(Path(folder) / PROFILE))
            path = Path(folder) / STEP_TIMES
            return Measured(job, tuple(KindTimes(**one) for one in read_json(path)) if path.exists() else ())
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"what it measured cannot be read: {error}") from error


def _keep(where: str, specs: Sequence[JobSpec], found: Mapping[str, MeasuredJob], device: str) -> None:
    mark = fingerprint(device)
    with opened(where, create=True) as store:
        for spec in specs:
            if spec.name in found:
                store.keep_profile(_key(spec, mark), found[spec.name].to_dict())


def _print(found: Mapping[str, Measured], trials: Mapping[str, Trial]) -> None:
    console = console_of()
    nodes = {name: measured.job for name, measured in found.items() if not measured.kinds}
    steps = {name: measured for name, measured in found.items() if measured.kinds}
    if nodes:
        console.print(_nodes_table(nodes))
    for name, job in nodes.items():
        if job.split:
            print(f"{name}: {harmless(job.split)}")
    if steps:
        console.print(_steps_table(steps))
    if trials:
        console.print(_runs_table(trials))


def _table(*headings: str) -> Table:
    table = plain_table("JOB", *headings, gap=1)
    table.columns[0].min_width = 8
    return table


def _nodes_table(found: Mapping[str, MeasuredJob]) -> Table:
    table = _table("CONFIGURATION", ">NODES", ">LONGEST\nMS", ">ITERATION\nMS", ">WORK/S\nALONE", ">PEAK\nMIB")
    table.columns[1].min_width = 13
    for name, job in found.items():
        for one in job.profiles:
            table.add_row(
                literal(name),
                str(one.configuration),
                str(len(one.nodes)),
                f"{max(node.duration_ns for node in one.nodes) / 1e6:.1f}",
                f"{one.duration_ns / 1e6:.1f}",
                f"{one.work / max(1, one.duration_ns) * 1e9:.4g}",
                f"{one.memory_bytes / 2**20:.0f}",
            )
    return table


def _steps_table(found: Mapping[str, Measured]) -> Table:
    times_ms = (">FIRST\nMS", ">P50\nMS", ">P99\nMS", ">LONGEST\nMS")
    table = _table(">KIND", ">STEPS", *times_ms, ">WORK/S\nALONE", ">PEAK\nMIB")
    for name, measured in found.items():
        [profile] = measured.job.profiles
        rate = f"{profile.work / profile.duration_ns * 1e9:.4g}"
        for one in measured.kinds:
            times = [f"{ns / 1e6:.2f}" for ns in (one.first_ns, one.p50_ns, one.p99_ns, one.longest_ns)]
            table.add_row(literal(name), str(one.kind), str(one.count), *times, rate, f"{one.peak_bytes / 2**20:.0f}")
    return table


def _runs_table(trials: Mapping[str, Trial]) -> Table:
    table = _table(">PAUSE\nMS", ">PEAK\nMIB")
    for name, trial in trials.items():
        pause_ms = trial.callbacks_ms.get(_PAUSE)
        table.add_row(literal(name), "-" if pause_ms is None else f"{pause_ms:.2f}", f"{trial.peak_bytes / 2**20:.0f}")
    return table

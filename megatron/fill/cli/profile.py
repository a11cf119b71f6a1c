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

from megatron.fill.cli.options import Json, Store, check_writable, opened
from megatron.fill.display import harmless
from megatron.fill.errors import ConfigError, FillError

if TYPE_CHECKING:
    from megatron.fill.config import JobSpec
    from megatron.fill.profiles import JobProfile, MeasuredJob


class NothingToMeasure(ConfigError):
    """A plain side task: no failure."""


def profile(
    jobs: Annotated[Path, typer.Argument(metavar="JOBS", help="A jobs file.")],
    device: Annotated[
        str | None, typer.Option("--device", metavar="DEVICE", help="cpu or cuda:0 (default: a GPU if there is one).")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the profiles here, for pipefill plan.")
    ] = None,
    store: Store = None,
    as_json: Json = False,
) -> None:
    """Measure each node of the jobs in each configuration: its time and its peak memory.

    With --store the profiles are kept there, and a training that serves it needs not measure these jobs in its bubbles.
    The device should have nothing else to do. Exits with 1 if a job could not be measured, or none was.

    --json prints, per job name, the list of its profiles: configuration, work per iteration, and nodes.
    """
    from megatron.fill.config import load_jobs
    from megatron.fill.device.meter import check_device, default_device

    where = device or default_device()
    try:
        check_device(where)
    except FillError as error:
        raise ConfigError(f"--device is {where!r}: {error}") from error
    search = [str(jobs.resolve().parent), os.getcwd()]
    found: dict[str, MeasuredJob] = {}
    wanted = load_jobs(jobs)
    specs = [spec for spec in wanted if spec.task is not None]
    if output is not None:
        check_writable("--output", output)
    if store is not None:
        with opened(store, create=True):
            pass  # before what takes long
    failures = {}
    for spec in specs:
        twin = next((found[one.name] for one in specs if one.name in found and _same(one, spec)), None)
        try:
            found[spec.name] = twin or _measure(spec, search, where)
        except NothingToMeasure as error:
            print(f"{spec.name}: {error}", file=sys.stderr)
        except ConfigError as error:
            failures[spec.name] = str(error)
    if store is not None:
        _keep(store, specs, found, where)
    profiles = {name: measured.to_dict()["configurations"] for name, measured in found.items()}
    if output is not None:
        output.write_text(json.dumps(profiles) + "\n", encoding="utf-8")
    if as_json:
        print(json.dumps(profiles, indent=2))
    else:
        _print(found)
    for name, reason in failures.items():
        print(f"{name}: not measured: {reason}", file=sys.stderr)
    for spec in wanted:
        if spec.task is None:
            print(f"{spec.name}: is a command: there is nothing to measure before it runs", file=sys.stderr)
    if failures or not found:
        raise typer.Exit(1)


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
    from megatron.fill.hearsay import read_json
    from megatron.fill.profiles import MeasuredJob
    from megatron.fill.runtime.guest import LIBRARY_SETTINGS
    from megatron.fill.runtime.measure import NO_NODES, MeasureSpec
    from megatron.fill.runtime.profiler import PROFILE

    with tempfile.TemporaryDirectory(prefix="pipefill-profile-") as folder:
        array = None if spec.array is None else list(spec.array)
        measured = MeasureSpec(spec.name, spec.task or "", spec.args, spec.memory, search, device, folder, array)
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
            error = NothingToMeasure if done.returncode == NO_NODES else ConfigError
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


def _print(found: Mapping[str, MeasuredJob]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

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
    Console().print(table)
    for name, measured in found.items():
        if measured.split:
            print(f"{name}: {harmless(measured.split)}")

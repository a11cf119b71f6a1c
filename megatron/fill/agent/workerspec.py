"""The spec file of a worker: its job, its limits and its sandbox."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.fill.agent.admission import environment, told
from megatron.fill.agent.ranking import Resident
from megatron.fill.agent.station import Station
from megatron.fill.device.port import Limits
from megatron.fill.folders import run_of
from megatron.fill.linux import safefile
from megatron.fill.profiles import cycle_to_dict
from megatron.fill.sandbox.cage import Bind, Cage
from megatron.fill.store.location import database_files, password_files
from megatron.fill.store.port import Job
from megatron.fill.worker.spec import WorkerSpec

_MEMORY_FILES_BYTES = 1 << 30  # limit for a job without a memory cap


def write_spec(
    station: Station,
    job: Job,
    limits: Limits,
    directory: Path,
    fixed: Mapping[str, str],
    beside: Resident | None,
) -> Path:
    """Write the spec into the job's folder, and return its path.

    Args:
        fixed: variables that the device needs, which the job must not change.
        beside: the resident job if this one is a tail job.

    Raises:
        OSError: it cannot be written.
    """
    agent, device = station.spec, station.device
    spec = WorkerSpec(
        name=job.name,
        directory=str(directory),
        gate_fd=agent.gate_fd,
        board_fd=agent.board_fd,
        control_fd=station.control_fd,
        baton_fd=station.baton_fd,
        environment=environment(os.environ, fixed, agent.user, directory),
        cage=_cage(station, job, limits, directory),
        tail=beside is not None,
        cycle=_cycle(station, beside),
        profiles=station.ranking.profile_of(job),
        checkpoint_s=agent.checkpoint_s,
        margin_bytes=agent.margin_bytes + device.overhead_bytes,
        device=device.worker_name,
        cpus=agent.cpus,
        emulate=agent.emulate,
        # A job could bring its own module with an allowed name, so an allowed module must be installed.
        work=replace(job.work, search=()) if agent.allow else job.work,
        limits=limits,
        sharing=agent.sharing,
        env={name: value for name, value in job.work.env.items() if name not in fixed}
        | told(job, agent.run_dir, directory),
    )
    path = directory / "spec.json"
    safefile.write_text(path, spec.to_json(), mode=0o600)
    return path


def _cage(station: Station, job: Job, limits: Limits, directory: Path) -> Cage:
    agent = station.spec
    mps = (Bind(agent.mps_pipe, writable=True),) if agent.mps_pipe is not None else ()
    return Cage(
        namespaces=agent.namespaces,
        directory=str(directory),
        binds=(*(Bind(place) for place in job.work.search), *agent.binds, *mps),
        runs=tuple({agent.run_dir, str(run_of(directory))}),
        masked=(*database_files(agent.store), *password_files(agent.store)),
        user=None if agent.user is None else agent.user.uid,
        group=None if agent.user is None else agent.user.gid,
        network=agent.network,
        memory_files_bytes=limits.memory_bytes or _MEMORY_FILES_BYTES,
        devices=station.device.nodes,
        host_memory_files=agent.mps_pipe is not None,
        real_time=agent.emulate is not None,
    )


def _cycle(station: Station, beside: Resident | None) -> dict[str, Any] | None:
    left = None if beside is None else station.ranking.leftover(beside)
    return None if left is None else cycle_to_dict(left)

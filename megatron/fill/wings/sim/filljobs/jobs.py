"""Fill jobs to simulate from a jobs file or a job store."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.fill.display import mib
from megatron.fill.errors import ConfigError
from megatron.fill.given.jobs import load_jobs
from megatron.fill.profiles import JobProfile
from megatron.fill.store import Job, JobStore, open_store
from megatron.fill.types import JobState
from megatron.fill.wings.sim.filljobs.catalog import best_rate
from megatron.fill.wings.sim.values import FillKind, SimJob

logger = logging.getLogger("pipefill.simulate")


def jobs_from_file(
    path: str | Path, kinds: Sequence[FillKind], size_s: float
) -> tuple[tuple[FillKind, ...], tuple[SimJob, ...]]:
    """Read the jobs of a jobs file, all waiting at the start, in the file's order, and their kinds.

    A job's kind is the one of its name; instances of a job with a count may share the kind of the first one, as
    ``pipefill profile --output`` names it.  Jobs that ask for memory are of a kind of their own.  Deadlines count from
    now, to the second.

    Args:
        size_s: seconds that each job takes on an otherwise idle device: neither a jobs file nor a file of profiles
            contains the total work.

    Raises:
        ConfigError: the file is invalid, or a job has no kind, or waits for one that is not in the file.
        ValueError: ``size_s`` is not above 0.
    """
    now_s = time.time()
    known = {kind.name: kind for kind in kinds}
    specs, used, jobs = load_jobs(path), {}, []
    ids = {spec.name: number for number, spec in enumerate(specs)}
    for number, spec in enumerate(specs):
        base = re.sub(r"-\d+$", "", spec.name)
        kind = known.get(spec.name) or known.get(base) or known.get(f"{base}-0")
        if kind is None:
            raise ConfigError(f"{path}: job {spec.name!r} has no profile; expected a name among {', '.join(known)}")
        for first in spec.after:
            if first not in ids:
                raise ConfigError(f"{path}: job {spec.name!r} waits for {first!r}, which is not in the file")
        kind = _asking(kind, spec.memory)
        used[kind.name] = kind
        jobs.append(
            SimJob(
                id=number,
                name=spec.name,
                kind=kind.name,
                arrival_s=0.0,
                work=size_s * kind.alone_rate,
                deadline_s=None if spec.deadline is None else float(round(spec.deadline - now_s)),
                user=spec.user,
                priority=spec.priority,
                after=tuple(ids[first] for first in spec.after),
            )
        )
    return tuple(used.values()), tuple(jobs)


def _asking(kind: FillKind, memory_bytes: int | None) -> FillKind:
    """Return the kind of the same jobs that ask for this memory."""
    if memory_bytes is None:
        return kind
    return replace(kind, name=f"{kind.name} ({mib(memory_bytes)})", memory_bytes=memory_bytes)


def jobs_from_store(
    where: str | Path, fingerprint: str, replay: bool = False
) -> tuple[tuple[FillKind, ...], tuple[SimJob, ...]]:
    """Read the jobs of a store, and the kinds that their stored profiles make; a warning names each that is left out.

    Jobs that share a profile are of one kind, named after the first of them.  Without ``replay``, the result is the
    unfinished jobs: all wait at the start, in the order of their submission, with their remaining work.  With it, the
    result is all jobs that were not cancelled, with all their work, at their times of submission relative to the first.

    Args:
        fingerprint: fingerprint of the device on which the profiles were measured (``megatron.fill.device.meter``).

    Raises:
        StoreError: the store does not exist.
        ConfigError: no job of it can be simulated.
    """
    store = open_store(where, create=False)
    try:
        states = [state for state in JobState if not state.finished]
        found = store.list([] if replay else states)
        found = [job for job in found if job.state is not JobState.CANCELLED]
        start_s = (found[0].submitted_s if found else 0.0) if replay else time.time()
        reader = _StoreReader(store, fingerprint, start_s, replay)
        for job in found:
            if missing := reader.read(job):
                reader.skipped.append(f"job {job.name!r} {missing}")
        reader.read_after()
    finally:
        store.close()
    if not reader.jobs:
        reasons = "; ".join(reader.skipped[:3]) or "it has no unfinished jobs"
        raise ConfigError(f"{where}: no job can be simulated: {reasons}")
    for reason in reader.skipped:
        logger.warning("left out: %s", reason)
    return tuple(reader.kinds.values()), tuple(reader.jobs)


class _StoreReader:
    """Converts a store's jobs to jobs of a simulation, one at a time."""

    def __init__(self, store: JobStore, fingerprint: str, start_s: float, replay: bool) -> None:
        self.kinds: dict[str, FillKind] = {}  # by the key of their profile, which depends on the memory asked for
        self.jobs: list[SimJob] = []
        self.skipped: list[str] = []
        self._store = store
        self._fingerprint = fingerprint
        self._start_s = start_s
        self._replay = replay
        self._after: dict[int, tuple[str, ...]] = {}  # names of prerequisites, by id
        self._contents: dict[str, dict[str, Any] | None] = {}

    def read(self, job: Job) -> str:
        """Add a job; if it cannot be simulated, return what is missing instead."""
        if job.work.command is not None:
            return "is a command, which has no profile"
        key = job.work.profile_key(self._fingerprint)
        if key not in self._contents:
            self._contents[key] = self._store.profile(key)
        content = self._contents[key]
        if content is None:
            return f"has no profile for {self._fingerprint}; expected one measured there"
        total = job.progress.total_work or content.get("total_work")
        if total is None:
            return "does not say how much work there is in all (total_work)"
        left = total if self._replay else total - job.progress.work_done
        if left <= 0:
            return "has no work left"
        kind = self._kind(key, job, content)
        deadline_s = None if job.deadline_s is None else job.deadline_s - self._start_s
        arrival_s = max(0.0, job.submitted_s - self._start_s) if self._replay else 0.0
        self._after[job.id] = job.work.after
        self.jobs.append(SimJob(job.id, job.name, kind.name, arrival_s, left, deadline_s, job.user, job.priority))
        return ""

    def read_after(self) -> None:
        """Make the jobs wait for their prerequisites that have yet to succeed; leave out those that can never begin."""
        states = self._store.states({name for names in self._after.values() for name in names})
        done = {name for name, state in states.items() if state is JobState.SUCCEEDED}
        names = {job.name for job in self.jobs}
        while stuck := {
            job.id: f"job {job.name!r} waits for {first!r}, which is left out"
            for job in self.jobs
            for first in self._after[job.id]
            if first not in done | names
        }:
            self.skipped += stuck.values()
            self.jobs = [job for job in self.jobs if job.id not in stuck]
            names = {job.name for job in self.jobs}
        ids: dict[str, list[int]] = {name: [] for name in names}
        for job in self.jobs:
            ids[job.name].append(job.id)
        self.jobs = [replace(job, after=tuple(self._first(job, ids))) for job in self.jobs]

    def _first(self, job: SimJob, ids: dict[str, list[int]]) -> Iterator[int]:
        for name in self._after[job.id]:
            if name in ids:
                # The latest of this name at the job's submission; a later number is of the same submission.
                yield max((number for number in ids[name] if number < job.id), default=max(ids[name]))

    def _kind(self, key: str, job: Job, content: dict[str, Any]) -> FillKind:
        if key not in self.kinds:
            try:
                profiles = tuple(JobProfile.from_dict(one) for one in content["configurations"])
                kind = FillKind(job.name, job.progress.unit, profiles, best_rate(profiles), job.work.memory_bytes)
            except (KeyError, TypeError, ValueError) as error:
                raise ConfigError(f"job {job.name!r}: its profile in the store: {error}") from error
            taken = {its.name for its in self.kinds.values()}
            self.kinds[key] = kind if kind.name not in taken else replace(kind, name=f"{kind.name} ({job.id})")
        return self.kinds[key]

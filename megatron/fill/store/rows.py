"""The transaction of a SQL store, which maps rows of the tables to the port's values."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import batched
from typing import Any

from sqlalchemy import Column, Connection, Double, Row, Select, case, cast, delete, func, insert, select, update

from megatron.fill.errors import StoreError
from megatron.fill.spec import typed
from megatron.fill.status import JobState, Status
from megatron.fill.store.schema import NAMES_LOCK, devices, jobs, profiles
from megatron.fill.store.values import DeviceEntry, Job, Progress
from megatron.fill.work import NewJob, Work

_UNFINISHED = (JobState.QUEUED, JobState.RUNNING)
_CHANGING = (
    *("started_s", "finished_s", "attempt", "owner", "lease_until_s", "cancelling", "device", "directory"),
    *("asked_by", "asked_s"),
)
_IDS_AT_A_TIME = 32
_NAMES_AT_A_TIME = 500


@dataclass(eq=False)
class SqlTransaction:
    """The ``Transaction`` that a connection is in."""

    _connection: Connection
    _clock: Callable[[], float] | None  # clock in seconds since the epoch; None for the database's own
    _locking: bool  # True to lock rows that are read, since they will be written
    repeats: bool

    @cached_property
    def now_s(self) -> float:
        """The time at its first use, the same for the whole transaction."""
        if self._clock is not None:
            return self._clock()
        return self._connection.scalars(select(cast(func.extract("epoch", func.clock_timestamp()), Double))).one()

    def lock_names(self) -> None:
        # Two transactions that insert the same names in different orders would deadlock.
        if self._connection.dialect.name == "postgresql":
            self._connection.execute(select(func.pg_advisory_xact_lock(NAMES_LOCK)))

    def add(self, new: Sequence[NewJob]) -> list[Job]:
        if not new:
            return []
        rows = [
            {
                "name": job.name,
                "spec": json.dumps(asdict(job.work)),
                "user": job.user,
                "priority": job.priority,
                "deadline_s": job.deadline_s,
                "submitted_s": self.now_s,
                "progress": json.dumps(asdict(Progress())),
            }
            for job in new
        ]
        inserted = insert(jobs).returning(jobs, sort_by_parameter_order=True)
        return [_job(row) for row in self._connection.execute(inserted, rows)]

    def put(self, job: Job) -> None:
        values: dict[str, Any] = {name: getattr(job, name) for name in _CHANGING} | {
            "state": job.state,
            "status": json.dumps(asdict(job.status)),
            "progress": json.dumps(asdict(job.progress)),
            "result": json.dumps(job.result),
        }
        self._connection.execute(update(jobs).where(jobs.c.id == job.id).values(values))

    def drop(self, ids: Sequence[int], before_s: float) -> list[int]:
        dropped: list[int] = []
        for batch in batched(ids, _NAMES_AT_A_TIME):
            # Asked of the row itself: the job may have been put back into the queue since it was read.
            old = jobs.c.state.not_in(_UNFINISHED) & (jobs.c.finished_s < before_s)
            rows = self._connection.scalars(delete(jobs).where(jobs.c.id.in_(batch), old).returning(jobs.c.id))
            dropped += rows
        return sorted(dropped)

    def job(self, job_id: int) -> Job | None:
        return self._first(select(jobs).where(jobs.c.id == job_id))

    def unfinished(self, names: Collection[str]) -> dict[str, Job]:
        found: dict[str, Job] = {}
        for batch in batched(sorted(names), _NAMES_AT_A_TIME):
            query = select(jobs).where(jobs.c.name.in_(batch), jobs.c.state.in_(_UNFINISHED))
            rows = self._connection.execute(query.order_by(jobs.c.id).with_for_update())
            found |= {row.name: _job(row) for row in rows}
        return found

    def latest(self, name: str) -> Job | None:
        return self._first(select(jobs).where(jobs.c.name == name).order_by(jobs.c.id.desc()).limit(1))

    def states(self, names: Collection[str]) -> dict[str, JobState]:
        found: dict[str, JobState] = {}
        for batch in batched(sorted(names), _NAMES_AT_A_TIME):
            latest = select(func.max(jobs.c.id)).where(jobs.c.name.in_(batch)).group_by(jobs.c.name)
            rows = self._connection.execute(select(jobs.c.name, jobs.c.state).where(jobs.c.id.in_(latest)))
            found |= {name: JobState(state) for name, state in rows}
        return found

    def first_queued(self, ids: Sequence[int]) -> Job | None:
        for batch in batched(ids, _IDS_AT_A_TIME):
            rank = case({job_id: place for place, job_id in enumerate(batch)}, value=jobs.c.id)
            queued = select(jobs).where(jobs.c.id.in_(batch), jobs.c.state == JobState.QUEUED)
            job = self._first(queued.order_by(rank).limit(1), skip_locked=True)
            if job is not None:
                return job
        return None

    def expired(self) -> list[Job]:
        query = select(jobs).where(jobs.c.state == JobState.RUNNING, jobs.c.lease_until_s <= self.now_s)
        return [_job(row) for row in self._connection.execute(query.with_for_update(skip_locked=True))]

    def jobs(self, states: Collection[JobState], limit: int | None) -> list[Job]:
        query = select(jobs).order_by(jobs.c.id.desc()).limit(limit)
        if states:
            query = query.where(jobs.c.state.in_(states))
        return [_job(row) for row in self._connection.execute(query)][::-1]

    def stamp(self) -> tuple[int, int, int]:
        # The index on states contains all that these queries need.
        queued = select(func.count(jobs.c.id), func.coalesce(func.sum(jobs.c.id), 0))
        count, total = self._connection.execute(queued.where(jobs.c.state == JobState.QUEUED)).one()
        succeeded = select(func.count(jobs.c.id)).where(jobs.c.state == JobState.SUCCEEDED)
        return count, int(total), self._connection.execute(succeeded).scalar_one()

    def used_s(self, since_s: float) -> dict[str, float]:
        # Added up here: each database reads JSON in its own way, and not all that is in a text.
        recent = jobs.c.finished_s.is_(None) | (jobs.c.finished_s >= since_s)
        found: dict[str, float] = {}
        for user, progress in self._connection.execute(select(jobs.c.user, jobs.c.progress).where(recent)):
            found[user] = found.get(user, 0.0) + json.loads(progress)["harvested_s"]
        return found

    def names(self, limit: int) -> list[str]:
        return list(self._connection.scalars(select(jobs.c.name).order_by(jobs.c.id.desc()).limit(limit)))

    def put_device(self, device: DeviceEntry, lease_s: float) -> None:
        data = {"cycle": json.dumps(device.cycle), "refuses": json.dumps(device.refuses)}
        self._upsert(devices.c.name, asdict(device) | data | {"lease_until_s": self.now_s + lease_s})

    def drop_device(self, name: str) -> None:
        self._connection.execute(delete(devices).where(devices.c.name == name))

    def devices(self) -> list[DeviceEntry]:
        rows = self._connection.execute(select(devices).where(devices.c.lease_until_s > self.now_s))
        # Sorted here, since databases sort text differently.
        return sorted((_device(row) for row in rows), key=lambda device: device.name)

    def profile(self, key: str) -> dict[str, Any] | None:
        text = self._connection.scalar(select(profiles.c.profile).where(profiles.c.key == key))
        return None if text is None else json.loads(text)

    def put_profile(self, key: str, profile: dict[str, Any]) -> None:
        self._upsert(profiles.c.key, {"key": key, "profile": json.dumps(profile), "kept_s": self.now_s})

    def _upsert(self, key: Column[str], values: dict[str, Any]) -> None:
        there = update(key.table).where(key == values[key.name]).values(values)
        if not self._connection.execute(there).rowcount:
            self._connection.execute(insert(key.table).values(values))

    def _first(self, query: Select[Any], skip_locked: bool = False) -> Job | None:
        if self._locking:  # without effect in SQLite, where a single writer has the whole database
            query = query.with_for_update(skip_locked=skip_locked)
        row = self._connection.execute(query).first()
        return None if row is None else _job(row)


def _job(row: Row[Any]) -> Job:
    values = dict(row._mapping)
    try:
        values["status"] = typed(Status, json.loads(values["status"]) | {"state": values.pop("state")})
        values["work"] = typed(Work, json.loads(values.pop("spec")))
        values["progress"] = Progress(**json.loads(values["progress"]))
        values["result"] = json.loads(values["result"])
        return Job(**values)
    except (ValueError, TypeError, AttributeError) as error:  # written by another version, or by hand
        wrong = f"job {row.id} in the job store cannot be read: {error}"
        raise StoreError(f"{wrong}; expected a row that this version of PipeFill writes") from None


def _device(row: Row[Any]) -> DeviceEntry:
    cycle, refuses = json.loads(row.cycle), tuple(json.loads(row.refuses))
    return DeviceEntry(row.name, row.run, row.busy_until_s, row.job, cycle, refuses)

"""The agent's client of the job store: heartbeats, claims and ends of jobs, with retries while the store is away.

A database that is locked, slow or gone does not affect jobs that run: heartbeats and requests are tried again after a
pause, and the agent's log says so once a minute.  The pause grows, but little once it has answered: others that reach
it sooner after an outage would take the jobs.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from megatron.fill.errors import FillError, JobError, StoreError
from megatron.fill.linux.files import write_text
from megatron.fill.status import JobState, Status
from megatron.fill.store import open_store
from megatron.fill.store.queue import JobStore
from megatron.fill.store.values import Claim, DeviceEntry, Progress, Standing
from megatron.fill.work import NewJob

logger = logging.getLogger("pipefill.agent")

_BEAT_S = 3.0  # most time between two heartbeats, which also carry progress out and cancellations in
_TICK_S = 0.5  # time between two looks whether a message is due
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0  # after a store has not answered; doubled until it does
_SAID_S = 60.0  # time between two lines of the log with the same error
_LAST_S = 5.0  # time for which a store that does not answer is tried at the end
SUBMITTED = "submitted.json"  # in the run folder
_VERSION = 1


@dataclass(slots=True)
class HeldClaim:
    """A job that this agent holds."""

    claim: Claim
    progress: Callable[[], Progress]  # returns the job's progress
    standing: Standing = Standing.HELD  # state of the claim at the latest heartbeat
    stepped: bool = False  # the store knows that the job has done a step since it was claimed
    beat_s: float = field(default_factory=time.monotonic)  # time of the latest heartbeat (``time.monotonic``)


@dataclass(eq=False, repr=False)
class Claims:
    """Keeps one agent's jobs and device alive in the store, in a thread of its own.

    Any thread may ask, hold and finish.  The thread here calls ``device`` and the progress of a claim.
    """

    url: str
    owner: str
    # Jobs to submit once the store can be reached; the store is created if need be.  None if an earlier agent has
    # submitted them: then a missing store is not created, since the new one would stay empty.
    submit: Sequence[NewJob] | None
    device: Callable[[], DeviceEntry]  # returns this agent's device entry
    lease_s: float  # time for which the store waits for a heartbeat
    dead: Sequence[str] = ()  # owners that are known to be dead; the jobs that they hold are given back
    submitted: Callable[[], None] = lambda: None  # called when they are in the store
    connect: Callable[..., JobStore] = open_store  # opens the store of a URL

    def __post_init__(self) -> None:
        self.every_s = min(_BEAT_S, self.lease_s / 3)
        self._store: JobStore | None = None
        # By job and attempt; other threads add and remove, each with one operation on the dictionary.
        self._held: dict[tuple[int, int], HeldClaim] = {}
        self._unsaid: list[Callable[[JobStore], bool]] = []  # ends of jobs that the store does not know yet
        self._connecting = threading.Lock()
        self._pause_s = _FIRST_PAUSE_S
        self._again_s = 0.0
        self._said, self._said_s = "", 0.0  # the error that the log has last, and when
        self._device_s = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="claims", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the heartbeats and remove the device from the store, unless it does not answer."""
        self._done.set()
        self._thread.join(_LAST_S)  # the rank waits, and a heartbeat may be under way at a server that is frozen

    def ask[T](self, question: Callable[[JobStore], T], patience_s: float = 0.0) -> T | None:
        """Return the store's answer; None if it cannot be reached (within ``patience_s``)."""
        end = time.monotonic() + patience_s
        while True:
            if patience_s or time.monotonic() >= self._again_s:
                try:
                    answer = question(self._connected())
                    self._pause_s = _FIRST_PAUSE_S
                    return answer
                except StoreError as error:
                    self._failed(error)
            if time.monotonic() >= end:
                return None
            time.sleep(min(_TICK_S, max(0.0, end - time.monotonic())))

    def renew(self, held: HeldClaim) -> None:
        """Send heartbeats for this job from now on."""
        self._held[held.claim.job.id, held.claim.attempt] = held

    def stop_renewing(self, claim: Claim) -> None:
        """Send no more heartbeats for this job; also where none are sent."""
        self._held.pop((claim.job.id, claim.attempt), None)

    def finish(
        self, claim: Claim, status: Status, progress: Progress, result: dict[str, Any], patience_s: float
    ) -> bool:
        """Report that the job has ended (QUEUED: give it back); False if it is another's now, or the store is away."""

        def say(store: JobStore) -> bool:
            end = store.release if status.state is JobState.QUEUED else store.finish
            return end(claim, status, progress, result)

        self.stop_renewing(claim)  # to a heartbeat after that, a job that has ended would look lost
        away = self._pause_s > _FIRST_PAUSE_S
        heard = self.ask(say, patience_s) if patience_s or not away else None
        if heard is None:  # reported again with the heartbeats; it counts if the lease still holds then
            self._unsaid.append(say)
        return bool(heard)

    def _say_rest(self, store: JobStore) -> None:
        while self._unsaid:
            with _alone("the end of a job cannot be told to the store"):  # then it is not tried again
                self._unsaid[0](store)
            self._unsaid.pop(0)

    def _connected(self) -> JobStore:
        """Return the store, once it has the jobs to submit, and dead agents' jobs are given back."""
        with self._connecting:
            if self._store is None:
                self._store = self.connect(self.url, create=self.submit is not None)
            jobs, self.submit = self.submit, None
            try:
                if jobs is not None:
                    self._submit_jobs(self._store, jobs)
            except StoreError:
                self.submit = jobs
                raise
            for owner in self.dead:
                self._store.disown(owner)
            self.dead = ()
        return self._store

    def _submit_jobs(self, store: JobStore, jobs: Sequence[NewJob]) -> None:
        try:
            store.submit(jobs)
        except JobError:  # one of the jobs is refused: submit the others
            for job in _firsts_first(jobs):
                try:
                    store.submit([job])
                except JobError as error:
                    logger.warning("job %s is not submitted: %s", job.name, error)
        self.submitted()

    def _failed(self, error: StoreError) -> None:
        if time.monotonic() < self._again_s:
            return  # another thread has found that out
        now_s = time.monotonic()
        if str(error) != self._said or now_s >= self._said_s + _SAID_S:
            logger.warning("the job store does not answer, trying again in %g s: %s", self._pause_s, error)
            self._said, self._said_s = str(error), now_s
        self._again_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S if self._store is None else _BEAT_S)

    def _run(self) -> None:
        while not self._done.wait(_TICK_S):
            try:
                self.ask(self._beat)
            except Exception:  # a failed heartbeat must not stop the next one
                logger.exception("a heartbeat failed")
        self.ask(self._say_last, _LAST_S if self._unsaid else 0.0)
        if self._store is not None:
            self._store.close()

    def _say_last(self, store: JobStore) -> None:
        self._say_rest(store)
        with _alone("the device cannot be taken out of the store"):
            store.forget_device(self.device().name)

    def _beat(self, store: JobStore) -> None:
        self._say_rest(store)
        now_s = time.monotonic()
        if now_s - self._device_s >= self.every_s:
            with _alone("the device's heartbeat failed"):
                store.report_device(self.device(), self.lease_s)
                self._device_s = now_s
        for key, held in self._held.copy().items():
            job = held.claim.job
            with _alone(f"the heartbeat of job {job.name} failed"):
                progress = held.progress()
                first = not held.stepped and progress.steps > job.progress.steps  # users wait to see that it runs
                if not first and now_s - held.beat_s < self.every_s:
                    continue
                standing = store.heartbeat(held.claim, progress, self.lease_s)
                if standing is not held.standing and key in self._held:
                    logger.info("job %s: %s", job.name, standing)
                held.standing, held.beat_s, held.stepped = standing, now_s, held.stepped or first

    def look_again(self) -> None:
        """Report the device at the next tick, since its load has changed."""
        self._device_s = 0.0


@contextmanager
def _alone(failed: str) -> Iterator[None]:
    """Log exceptions of this block instead of raising them, except StoreError, after which the caller tries again."""
    try:
        yield
    except StoreError:
        raise
    except Exception:
        logger.exception(failed)


def _firsts_first(jobs: Iterable[NewJob]) -> list[NewJob]:
    """Return the jobs in an order in which each follows the jobs that it depends on (``after``)."""
    by_name = {job.name: job for job in jobs}
    before = {job.name: [first for first in job.work.after if first in by_name] for job in by_name.values()}
    return [by_name[name] for name in TopologicalSorter(before).static_order()]


def not_yet_submitted(run_dir: Path, store: str, jobs: Sequence[NewJob]) -> list[NewJob]:
    """Return those of ``jobs`` that this run has not submitted to this store; jobs are equal if name and work are.

    FillError if the run's file of submitted jobs cannot be read.
    """
    known = set(_read_submitted(run_dir))
    return [job for job in jobs if _digest(store, job) not in known]


def note_submitted(run_dir: Path, store: str, jobs: Iterable[NewJob]) -> None:
    digests = list(dict.fromkeys([*_read_submitted(run_dir), *(_digest(store, job) for job in jobs)]))
    write_text(run_dir / SUBMITTED, json.dumps({"version": _VERSION, "jobs": digests}) + "\n")


def forget_submitted(run_dir: Path) -> None:
    """Delete the record, so that all jobs are submitted again."""
    (run_dir / SUBMITTED).unlink(missing_ok=True)


def _read_submitted(run_dir: Path) -> list[str]:
    path = run_dir / SUBMITTED
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["version"] == _VERSION:
            return [str(digest) for digest in content["jobs"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise FillError(f"{path} is not what a run notes of the jobs that it submitted; expected it whole, or not there")


def _digest(store: str, job: NewJob) -> str:
    return hashlib.sha256(json.dumps([store, job.name, job.work.identity()]).encode()).hexdigest()

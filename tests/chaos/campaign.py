"""A chaos run: submits the tasks with faults, commits the other faults, and observes jobs and training."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.fill.errors import JobError, StoreError
from megatron.fill.store import open_store
from megatron.fill.types import JobState
from tests.chaos import plan, processes
from tests.chaos.attacks import cgroups, outside
from tests.chaos.clock import JumpingClock
from tests.chaos.deed import Deed
from tests.chaos.disk import SmallDisk
from tests.chaos.injector import Injector
from tests.chaos.kind import FaultKind, Source
from tests.chaos.kinds import HONEST
from tests.chaos.mainjob import GivenUpError, RepeatedTraining, TrainingRun
from tests.chaos.meminfo import FreeMemory
from tests.chaos.outside import Outside
from tests.chaos.sight import look
from tests.chaos.submitting import Submitter
from tests.chaos.verdict import Lost, Submitted, judge

_LOOK_S, _TELL_S = 0.3, 1.0
_NO_NEWS_S = 90.0  # time without the end of any job after which the rest are given up
_QUIET_SHARE, _LEAST_QUIET_S, _LONGEST_QUIET_S = 0.4, 3.0, 10.0  # relative to the window with faults before it; bounds
_END_S = 10.0  # how long wardens and agents may outlive the last training
_ROUNDS = 4  # to repeat faults that did not happen
_UNFINISHED = [state for state in JobState if not state.finished]


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of time in CLOCK_MONOTONIC: with faults, or without any job.

    Attributes:
        alone: it has faults that slow the training down by their nature, and is not compared.
    """

    start_ns: int
    end_ns: int
    faults: bool
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Findings:
    """The observations of a chaos run.

    Attributes:
        wanted: number of faults asked for, by kind.
        leaked: processes that were left when the last training had ended.
        unjudged: names of jobs whose end was not seen, as the run was cut off.
        cut_off: Ctrl-C or SIGTERM ended the run.
    """

    wanted: Mapping[str, int]
    jobs: Sequence[Submitted]
    deeds: Sequence[Deed]
    lost: Sequence[Lost]
    windows: Sequence[Stretch]
    segments: Sequence[TrainingRun]
    leaked: Sequence[int]
    unjudged: Collection[str] = ()
    cut_off: bool = False

    def judged(self) -> list[Submitted]:
        """The jobs whose end was seen."""
        return [job for job in self.jobs if job.name not in self.unjudged]

    def injected(self) -> Counter[str]:
        """The number of verified faults by kind: independent causes.

        A job counts once, however often it repeats its fault: it is verified by its mark and its end.  So does an
        action of the driver, by what the driver observed.
        """
        astray = {one.job for one in self.lost}
        counts = Counter(deed.kind for deed in self.deeds)
        counts.update(job.kind.name for job in self.judged() if job.name not in astray and job.tried)
        return counts

    def never_tried(self) -> dict[str, str]:
        """The kinds of attacks none of whose jobs found a target, each with the message of one job."""
        missed = {job.kind.name: job.missed()[0].detail for job in self.jobs if job.missed() and not job.tried}
        tried = {job.kind.name for job in self.jobs if job.tried}
        return {kind: why for kind, why in missed.items() if kind not in tried}

    def marks(self) -> Counter[str]:
        """The number of times that faults were seen to happen, by kind: a job that is tried again repeats its own."""
        counts = Counter(deed.kind for deed in self.deeds)
        for job in self.jobs:
            counts[job.kind.name] += len(job.faults())
        return +counts


class Campaign:
    """A chaos run.

    Args:
        kinds: kinds to inject, without those that cannot be run here.
        folder: for all files that it writes; empty.
        iterations: iterations of each training.
        say: prints a line for the user.
        machine_network: inode of the network namespace that must not be touched.
    """

    def __init__(
        self,
        script: Path,
        kinds: Sequence[FaultKind],
        folder: Path,
        disk: SmallDisk,
        iterations: int,
        say: Callable[[str], None],
        machine_network: int = 0,
    ) -> None:
        self.kinds = kinds
        self.folder = folder
        self.say = say
        memory = FreeMemory(folder)
        if any(kind.name.startswith("grow-") for kind in kinds):
            memory.mount()
        clock, database = JumpingClock(folder / "clock"), disk.folder / "jobs.db"
        self.main = RepeatedTraining(script, folder, disk.folder, clock, iterations, say)
        self.injector = Injector(clock, disk, database, self.main.tick)
        self.store = open_store(database)
        self.submitter = Submitter(self.store, folder / "marks", disk.folder, machine_network)
        self.outside = Outside(self.main, self.injector, self.submitter, memory, folder)
        self._told_s = 0.0
        self.lost: list[Lost] = []
        self.deeds: list[Deed] = []
        self.windows: list[Stretch] = []
        self._judged = 0  # number of the submitter's jobs that were judged

    def run(self, faults: int, seed: int) -> Findings:
        """Inject ``faults`` faults, and end everything that was started; called once.

        Raises:
            FillError: the training does not run at all.
            KeyboardInterrupt: there was no job yet; later, the findings until then are returned.
        """
        wanted, cut_off = plan.quotas(self.kinds, faults), False
        try:
            self.main.refer()
            for turn in range(_ROUNDS):
                # One that did harm is not tried again: the run has failed anyway.
                tried = self._findings(wanted).injected() + Counter(one.kind for one in self.lost)
                elements = plan.missing(self.kinds, wanted, tried)
                for batch in plan.batches(elements, seed + turn):
                    self._inject(batch)
                    total = self._findings(wanted).injected().total()
                    self.say(f"{total} of {faults} faults, {len(self.submitter.jobs)} jobs, {len(self.lost)} lost")
            self.main.finish()
            processes.await_end(self.main.mark, self.folder, _END_S)
        except GivenUpError as error:
            self.say(str(error))
        except KeyboardInterrupt:
            if not self.submitter.jobs:
                raise
            cut_off = True
            self.say("cut off: what was seen until now is the result")
            self.main.cut_off()
        finally:
            self.main.abandon()
            self.store.close()
            leaked = processes.end_all(self.main.mark, self.folder)
            cgroups.sweep(self.main.disk)
        return self._findings(wanted, leaked, cut_off)

    def _findings(self, wanted: Mapping[str, int], leaked: Sequence[int] = (), cut_off: bool = False) -> Findings:
        jobs, segments = self.submitter.jobs, self.main.segments
        unjudged = {job.name for job in jobs[self._judged :]}
        return Findings(wanted, jobs, self.deeds, self.lost, self.windows, segments, leaked, unjudged, cut_off)

    def _inject(self, batch: Sequence[FaultKind]) -> None:
        """Inject a batch in a window of its own, with a quiet window after it."""
        self._settle()
        self._tell()
        start_ns = time.monotonic_ns()
        first, ours = len(self.submitter.jobs), (Source.DRIVER, Source.VICTIM)
        for kind in (*batch, *[HONEST] * plan.HONEST_PER_BATCH):
            if kind.source not in ours:
                self.submitter.submit(kind)
        for kind in batch:
            if kind.source is Source.VICTIM:
                victim = self.submitter.submit(kind)  # only now: it should not be done before it is hit
                self._note(self.injector.hit(kind.name, victim.notes, self._tops))
            elif kind.source is Source.DRIVER:
                self._settle()
                self._note(self._commit(kind))
        self._await(self.submitter.jobs[first:])
        cgroups.sweep(self.main.disk)
        end_ns = time.monotonic_ns()
        self.windows.append(Stretch(start_ns, end_ns, faults=True, alone=any(kind.alone for kind in batch)))
        quiet_s = min(max(_LEAST_QUIET_S, _QUIET_SHARE * (end_ns - start_ns) / 1e9), _LONGEST_QUIET_S)
        self._settle()  # between two trainings there is nothing to compare with
        quiet_ns = time.monotonic_ns()
        self._pause(lambda: time.monotonic_ns() - quiet_ns > quiet_s * 1e9)
        self.windows.append(Stretch(quiet_ns, time.monotonic_ns(), faults=False))

    def _commit(self, kind: FaultKind) -> Deed | None:
        """Commit a fault of the driver's."""
        if kind in outside.KINDS:
            return self.outside.commit(kind.name)
        return self.injector.commit(kind.name, self.main.run_dir)

    def _tell(self) -> None:
        """Tell the attackers, every second, the targets that they may not see."""
        if self.main.training is None or time.monotonic() < self._told_s + _TELL_S:
            return
        self._told_s = time.monotonic()
        agents = list(self._tops())
        wardens = [processes.parent(pid) for pid in agents]
        look(self.main.training.ranks, [*agents, *wardens], self.main.run_dir).write(self.submitter.notes)

    def _tops(self) -> Collection[int]:
        return processes.agents(self.main.run_dir).values()

    def _note(self, deed: Deed | None) -> None:
        if deed is not None:
            self.deeds.append(deed)
            if deed.wrong:
                self._lose(Lost(deed.kind, deed.kind, deed.wrong))

    def _lose(self, lost: Lost) -> None:
        self.lost.append(lost)
        self.say(f"lost: {lost.job}: {lost.why}")

    def _settle(self) -> None:
        self._pause(self.main.settled)

    def _pause(self, over: Callable[[], bool]) -> None:
        while not over():
            self.main.tick()
            time.sleep(_LOOK_S)

    def _await(self, jobs: Sequence[Submitted]) -> None:
        """Wait until all have ended, and judge them; jobs that do not end are cancelled."""
        ids = {job.id for job in jobs}
        left, news_s = len(ids), time.monotonic()
        while left and time.monotonic() - news_s < _NO_NEWS_S:
            self.main.tick()
            self._tell()
            time.sleep(_LOOK_S)
            now_left = left
            with contextlib.suppress(StoreError):  # it is busy
                now_left = len(ids & {job.id for job in self.store.list(_UNFINISHED)})
            if now_left != left or not self.main.settled():
                left, news_s = now_left, time.monotonic()
        for submitted in jobs:
            job = self.store.get(submitted.id)
            lost = judge(submitted, job)
            if lost is not None:
                self._lose(lost)
            if not job.state.finished:
                self._give_up(job.id)
        self._judged = len(self.submitter.jobs)

    def _give_up(self, number: int) -> None:
        try:
            self.store.cancel(number)
        except (JobError, StoreError) as error:  # it has ended just now, or nothing can be written
            self.say(str(error))

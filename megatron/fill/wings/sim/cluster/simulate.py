"""The simulation of a cluster whose main jobs leave bubbles, and of its fill jobs (PipeFill, section 5.3).

Every decision is the runtime's own: plans come from the planner (``rates.py``), a seat's next job from the scheduler
(``queue.py``).  The simulator adds time:

- All events of one instant are handled first; then free resident seats look for jobs, the lowest device first, then
  free tail seats.  (In the runtime, seats look every few seconds, in any order.)  So a tail seat gets no job that an
  idle device would run in whole bubbles, and a seat stays empty only if no waiting job fits it.
- A claim is followed by ``start_s`` without progress.  A tail seat opens with its resident job's first step; while no
  resident job serves bubbles, a tail job has whole ones.
- A device fails after an exponentially distributed time in which its main job runs.  The whole main job stops with it,
  so only the first failure of all its devices is drawn, with a mean of ``mtbf_s`` over their number.  Its fill jobs
  return to the queue with their last checkpoint.  When a main job ends as planned, they save all their work.
- A job that fits whole bubbles of no device of any main job fails when it arrives.
- A job that waits for others (``after``) joins the queue when the last of them succeeds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from math import inf, isfinite

import numpy as np

from megatron.fill.scheduler.policies import parse_policy
from megatron.fill.types import JobState
from megatron.fill.wings.sim.cluster.engine import Calendar, Event, EventKind
from megatron.fill.wings.sim.cluster.fleet import FleetDevice, Seats
from megatron.fill.wings.sim.cluster.ledger import MainEntry, inventory
from megatron.fill.wings.sim.cluster.progress import SimulatedAttempt, Usage
from megatron.fill.wings.sim.cluster.queue import RankedQueue, SteadyQueue
from megatron.fill.wings.sim.cluster.rates import Fit
from megatron.fill.wings.sim.cluster.sight import Waiting, sight
from megatron.fill.wings.sim.values import JobOutcome, Scenario, SimOutcome


def simulate(scenario: Scenario) -> SimOutcome:
    """Run a scenario from 0 to its ``duration_s``; the same scenario has the same outcome, except for ``wall_s``.

    Devices with equal cycles share their plans, one of them asks for all, a steady policy's queue is kept in order, and
    built-in policies see only the devices that can affect them.  The outcome is as if every device ranked all jobs by
    itself.  The user's own policies (``module:function``) see all devices, which is slow with thousands.  ConfigError
    if the policy cannot be read, or failed on a job.
    """
    began_s = time.perf_counter()
    cluster = Cluster(scenario)
    while cluster.step():
        pass
    return SimOutcome(
        jobs=tuple(cluster.jobs),
        groups=tuple(entry.outcome() for entry in cluster.groups),
        duration_s=scenario.duration_s,
        events=cluster.events,
        failures=cluster.failures,
        wall_s=time.perf_counter() - began_s,
    )


class Cluster:
    """The mutable state of a simulation.

    Attributes:
        present: attempts that have a seat, by the number of their job.
        fitting: kinds of jobs that fit whole bubbles of some device.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.now_s = 0.0
        self.events = 0
        self.failures = 0
        self.jobs = [JobOutcome(job.id) for job in scenario.jobs]
        self.present: dict[int, SimulatedAttempt] = {}
        self.mains, self.groups, self.devices = inventory(scenario)
        self._alone_rates = {kind.name: kind.alone_rate for kind in scenario.kinds}
        self._succeeded: set[int] = set()  # ids of the jobs that have succeeded
        self._missing: dict[int, set[int]] = {}  # prerequisites yet to succeed, by number of a job that has arrived
        self._dependents: dict[int, list[int]] = {}  # numbers of the jobs that they are missing to, by their id
        self.usage = Usage()
        policy = parse_policy(scenario.policy)
        self._weighs_users = not policy.steady
        self.sight = sight(policy, self.usage, self.devices)
        self.queue = SteadyQueue(policy) if policy.steady else RankedQueue(policy, self.sight)
        self.resident_seats, self.tail_seats = Seats(len(self.devices)), Seats(len(self.devices))
        self.fitting = {kind for device in self.devices for kind in device.rates.whole.fits}
        self.calendar = Calendar()
        for number in sorted(range(len(self.jobs)), key=lambda n: (scenario.jobs[n].arrival_s, scenario.jobs[n].id)):
            self.calendar.announce(scenario.jobs[number].arrival_s, EventKind.ARRIVAL, number)
        self._random = [np.random.default_rng([scenario.failures.seed, number]) for number in range(len(self.mains))]
        self._tokens = count(1)
        self._handlers: dict[EventKind, Callable[[Event], bool]] = {
            EventKind.ARRIVAL: self._arrive,
            EventKind.JOB_STARTS: self._job_starts,
            EventKind.JOB_ENDS: self._job_ends,
            EventKind.MAIN_STARTS: self._main_starts,
            EventKind.MAIN_ENDS: self._main_ends,
            EventKind.MAIN_FAILS: self._main_fails,
        }
        for number, main in enumerate(self.mains):
            self.calendar.announce(main.run.start_s, EventKind.MAIN_STARTS, number, main.token)
            self.calendar.announce(main.run.end_s, EventKind.MAIN_ENDS, number)

    def step(self) -> bool:
        """Advance to the next event; return False when the simulated time is over."""
        next_s = self.calendar.next_s
        if next_s > self.scenario.duration_s or next_s == inf:
            self._stop()
            return False
        self.now_s = next_s
        for event in self.calendar.take(next_s):
            self.events += self._handlers[event.kind](event)
        self._serve(self.resident_seats)
        self._serve(self.tail_seats)
        return True

    # Handlers return False for an outdated event.

    def _arrive(self, event: Event) -> bool:
        number, job = event.about, self.scenario.jobs[event.about]
        if job.kind not in self.fitting:
            self.jobs[number].state = JobState.FAILED
        elif firsts := set(job.after) - self._succeeded:
            self._missing[number] = firsts
            for first in firsts:
                self._dependents.setdefault(first, []).append(number)
        else:
            self._enqueue(number)
        return True

    def _main_starts(self, event: Event) -> bool:
        number = event.about
        main = self.mains[number]
        if main.token != event.token:
            return False
        main.change(True, self.now_s, self.now_s)
        for device in self.devices[main.first : main.last]:
            device.up = True
            self._open_resident_seat(device)
            self.sight.changed(device)
        mtbf_s = self.scenario.failures.mtbf_s
        if isfinite(mtbf_s) and main.last > main.first:
            fails_s = self.now_s + self._random[number].exponential(mtbf_s / (main.last - main.first))
            self.calendar.announce(fails_s, EventKind.MAIN_FAILS, number, main.token)
        return True

    def _main_fails(self, event: Event) -> bool:
        main = self.mains[event.about]
        if main.token != event.token:
            return False
        self.failures += 1
        self._leave_devices(main, saved=False)
        main.change(False, self.now_s, self.now_s)
        again_s = self.now_s + self.scenario.failures.restart_s
        self.calendar.announce(again_s, EventKind.MAIN_STARTS, event.about, main.token)
        return True

    def _main_ends(self, event: Event) -> bool:
        main = self.mains[event.about]
        if main.up:
            self._leave_devices(main, saved=True)
        main.change(False, None, self.now_s)
        return True

    def _leave_devices(self, main: MainEntry, saved: bool) -> None:
        """Return all fill jobs of a main job to the queue, with all their work if ``saved``."""
        for device in self.devices[main.first : main.last]:
            device.up = False
            self.resident_seats.close(device.index)
            self.tail_seats.close(device.index)
            for attempt in (device.resident, device.tail):
                if attempt is not None:
                    self._pace(attempt, 0.0)
                    self._close(attempt, attempt.done if saved else attempt.kept)
            device.resident = device.tail = None
            self.sight.changed(device)

    def _job_starts(self, event: Event) -> bool:
        attempt = self.present.get(event.about)
        if attempt is None or attempt.token != event.token:
            return False
        device = self.devices[attempt.device]
        attempt.begin(self.now_s)
        if attempt.tail:
            self._pace_tail(device)
            return True
        self._pace(attempt, device.rates.resident_rate(attempt.fit))
        if device.tail is not None:
            self._pace_tail(device)
        else:
            self._open_tail_seat(device)
        return True

    def _job_ends(self, event: Event) -> bool:
        attempt = self.present.get(event.about)
        if attempt is None or attempt.token != event.token:
            return False
        device = self.devices[attempt.device]
        self._pace(attempt, 0.0)
        self._close(attempt, attempt.work)
        if attempt.tail:
            device.tail = None
            if device.resident is None:
                self._open_resident_seat(device)
            elif device.resident.started_s is not None:
                self._open_tail_seat(device)
            return True
        device.resident = None
        self.tail_seats.close(device.index)
        if device.tail is not None:
            self._pace_tail(device)
        self._open_resident_seat(device)
        self.sight.changed(device)
        return True

    # Seats

    def _serve(self, seats: Seats) -> None:
        """Give jobs to free seats as long as a waiting job fits one of them."""
        while self.queue.kinds and (index := seats.lowest(self.queue.kinds)) is not None:
            device, offer = self.devices[index], seats.offers[index]
            assert offer is not None
            waiting = self.queue.take(device, offer, self.now_s)
            seats.close(index)
            self._claim(waiting, device, offer.fits[waiting.job.kind], tail=seats is self.tail_seats)

    def _claim(self, waiting: Waiting, device: FleetDevice, fit: Fit, tail: bool) -> None:
        entry, runtime, index = self.jobs[waiting.index], self.scenario.runtime, waiting.index
        attempt = SimulatedAttempt(
            job=index,
            work=waiting.job.work,
            kept=entry.work_done,
            device=device.index,
            tail=tail,
            fit=fit,
            claimed_s=self.now_s,
            checkpoint_s=runtime.checkpoint_s,
            token=next(self._tokens),
        )
        entry.state, self.present[index] = JobState.RUNNING, attempt
        entry.attempts += 1
        if entry.started_s is None:
            entry.started_s = self.now_s
        begins_s = self.now_s + runtime.start_s
        self.calendar.announce(begins_s, EventKind.JOB_STARTS, index, attempt.token)
        if tail:
            device.tail = attempt
        else:
            device.resident = attempt
            attempt.due_s = begins_s + waiting.left / device.rates.resident_rate(fit)
            self.sight.changed(device)

    def _open_resident_seat(self, device: FleetDevice) -> None:
        beside = None if device.tail is None else device.tail.fit
        self.resident_seats.free(device.index, device.rates.resident_offer(beside))

    def _open_tail_seat(self, device: FleetDevice) -> None:
        if self.scenario.runtime.tail and device.resident is not None:
            self.tail_seats.free(device.index, device.rates.tail_offer(device.resident.fit))

    # Jobs

    def _enqueue(self, index: int) -> None:
        job, entry = self.scenario.jobs[index], self.jobs[index]
        entry.state = JobState.QUEUED
        self.queue.add(Waiting(index, job, job.work - entry.work_done, entry.attempts))

    def _pace_tail(self, device: FleetDevice) -> None:
        tail, resident = device.tail, device.resident
        if tail is not None and tail.started_s is not None:
            beside = resident.fit if resident is not None and resident.started_s is not None else None
            self._pace(tail, device.rates.tail_rate(tail.fit, beside))

    def _pace(self, attempt: SimulatedAttempt, rate: float) -> None:
        """Change the job's rate from now on."""
        if self._weighs_users:
            profile, user = attempt.fit.profile, self.scenario.jobs[attempt.job].user
            step_s = profile.duration_ns / 1e9 / profile.work
            self.usage.change(user, (rate - attempt.rate) * step_s, self.now_s)
        attempt.go_on_at(rate, self.now_s)
        attempt.token = next(self._tokens)
        if rate:
            self.calendar.announce(attempt.end_s, EventKind.JOB_ENDS, attempt.job, attempt.token)

    def _close(self, attempt: SimulatedAttempt, kept: float) -> None:
        """End an attempt with ``kept`` saved work; the job has succeeded or waits again."""
        self._account(attempt, kept)
        entry = self.jobs[attempt.job]
        if kept >= attempt.work:
            entry.state, entry.ended_s = JobState.SUCCEEDED, self.now_s
            self._succeeded.add(entry.id)
            for number in self._dependents.pop(entry.id, ()):
                self._missing[number].remove(entry.id)
                if not self._missing[number]:
                    self._enqueue(number)
        else:
            self._enqueue(attempt.job)

    def _account(self, attempt: SimulatedAttempt, kept: float) -> None:
        """Account for an attempt that ends; ``kept`` is the job's saved work from now on."""
        entry, place = self.jobs[attempt.job], self.groups[self.devices[attempt.device].group]
        seconds = self.now_s - attempt.claimed_s
        entry.device_s += seconds
        place.alone_s += (kept - entry.work_done) / self._alone_rates[attempt.fit.kind]
        entry.work_done = kept
        del self.present[attempt.job]
        if attempt.tail:
            place.tail_s += seconds
        else:
            place.resident_s += seconds

    def _stop(self) -> None:
        """Close the simulation: running jobs count with the work that they have done."""
        self.now_s = self.scenario.duration_s
        for _, attempt in sorted(self.present.items()):
            attempt.advance(self.now_s)
            self._account(attempt, attempt.done)
        for main in self.mains:
            main.change(False, None, self.now_s)

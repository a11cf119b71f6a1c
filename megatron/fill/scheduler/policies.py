"""Policies: score functions over (job, device states), higher first (PipeFill, section 4.4).

A score is a number or a tuple of numbers, compared from the left.  Only the order of a policy's scores counts: for a
weighted sum they are replaced by ranks among the jobs that wait for the device, from 1 for the best to 0 for the worst,
evenly spaced, with equal ranks for equal scores.  So weights mean the same for all policies, and an outlier does not
flatten the other scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, isfinite, isnan
from pkgutil import resolve_name

from megatron.fill.errors import ConfigError
from megatron.fill.scheduler.state import DeviceState, JobView, SchedulerState

type Score = float | tuple[float, ...]
type ScoreFunction = Callable[[JobView, SchedulerState, DeviceState], Score]

DEFAULT_POLICY = "priority"  # with equal priorities, first come, first served
MOST_JOBS = 500  # of more waiting jobs, only the first submitted are compared


def fifo(job: JobView, state: SchedulerState, device: DeviceState) -> Score:
    """First come, first served."""
    return -job.submitted_s


def shortest_job_first(job: JobView, state: SchedulerState, device: DeviceState) -> Score:
    """Shortest remaining processing time on this device first: the least mean completion time on one device."""
    return -state.processing_s(job, device)


def makespan(job: JobView, state: SchedulerState, device: DeviceState) -> Score:
    """Earliest end of all jobs together.

    Jobs that would not be done earlier on another device (waiting for it included) come first, in descending order of
    processing time (Graham's longest processing time first); then the others, in ascending order of their delay here.
    """
    here_s = state.done_s(job, device)
    elsewhere_s = min((state.done_s(job, other) for other in state.devices if other.name != device.name), default=inf)
    if here_s <= elsewhere_s:
        return (1.0, state.processing_s(job, device))
    return (0.0, elsewhere_s - here_s)


def deadline(job: JobView, state: SchedulerState, device: DeviceState) -> Score:
    """Earliest deadline first.

    Jobs that can still meet it on this device come before those that cannot, and those before jobs without a deadline.
    """
    if job.deadline_s is None:
        return (0.0, 0.0)
    in_time = state.now_s + state.processing_s(job, device) <= job.deadline_s
    return (2.0 if in_time else 1.0, -job.deadline_s)


def priority(job: JobView, state: SchedulerState, device: DeviceState) -> Score:
    """Highest priority first."""
    return job.priority


def fair_share(job: JobView, state: SchedulerState, device: DeviceState) -> Score:
    """Jobs of the user with the least device time so far first."""
    return -state.used_s.get(job.user, 0.0)


POLICIES: dict[str, ScoreFunction] = {
    "fifo": fifo,
    "sjf": shortest_job_first,
    "makespan": makespan,
    "deadline": deadline,
    "priority": priority,
    "fair": fair_share,
}

# Policies whose score depends only on the job and its processing time on the device, and never rises with that time.
# So it does not change while the job waits, and jobs that differ only in their work have the same order on all devices.
STEADY: frozenset[ScoreFunction] = frozenset({fifo, shortest_job_first, priority})

# Policies that read ``SchedulerState.used_s``, which requires reading every job; for others it is left empty.
WEIGHS_USERS: frozenset[ScoreFunction] = frozenset({fair_share})


@dataclass(frozen=True, slots=True)
class Policy:
    """A weighted sum of score functions."""

    terms: tuple[tuple[float, str, ScoreFunction], ...]  # weight, name and function of each

    @property
    def steady(self) -> bool:
        """True if waiting jobs can be kept in order and need not be compared at each claim (``STEADY``)."""
        return len(self.terms) == 1 and self.terms[0][2] in STEADY

    @property
    def weighs_users(self) -> bool:
        """True if a term may read ``used_s``: one of ``WEIGHS_USERS``, or a function that is not built in."""
        return not self.built_in or any(function in WEIGHS_USERS for _, _, function in self.terms)

    @property
    def built_in(self) -> bool:
        """True if all score functions are PipeFill's own."""
        return all(function in POLICIES.values() for _, _, function in self.terms)

    @property
    def most_jobs(self) -> int | None:
        """The number of waiting jobs to score, the first submitted; None for all."""
        return None if self.steady else MOST_JOBS

    def score_one(self, job: JobView, state: SchedulerState, device: DeviceState) -> tuple[float, ...]:
        """The score of a job by a policy that is no sum, comparable with that of other jobs.

        Raises:
            ConfigError: the score function failed, or returned an invalid score.
        """
        [(_, name, function)] = self.terms
        return _score(name, function, job, state, device)

    def scores(self, jobs: Sequence[JobView], state: SchedulerState, device: DeviceState) -> list[float]:
        """The score of each job, from 0 to the sum of the weights.

        Raises:
            ConfigError: a score function failed, or returned an invalid score.
        """
        total = [0.0] * len(jobs)
        for weight, name, function in self.terms:
            scores = [_score(name, function, job, state, device) for job in jobs]
            order = sorted(set(scores))
            places = {score: place / max(1, len(order) - 1) for place, score in enumerate(order)}
            total = [sum_ + weight * places[score] for sum_, score in zip(total, scores, strict=True)]
        return total


def parse_policy(text: str) -> Policy:
    """Parse a policy: a name of ``POLICIES``, ``module:function``, or a sum of them such as ``0.7*sjf+deadline``.

    Raises:
        ConfigError: the text is not a policy, or a function cannot be imported.
    """
    return Policy(tuple(_term(part.strip(), text) for part in text.split("+")))


def _term(part: str, text: str) -> tuple[float, str, ScoreFunction]:
    head, star, name = part.rpartition("*")
    try:
        weight = float(head) if star else 1.0
    except ValueError:
        weight = -1.0
    if not (isfinite(weight) and weight > 0):
        raise ConfigError(f"policy {text!r}: weight {head!r}; expected a number above 0, as in 0.7*sjf+0.3*deadline")
    return weight, name.strip(), _function(name.strip(), text)


def _function(name: str, text: str) -> ScoreFunction:
    if name in POLICIES:
        return POLICIES[name]
    if not all(name.partition(":")):
        raise ConfigError(f"policy {text!r}: {name!r} is none of {', '.join(POLICIES)}, nor module:function")
    try:
        function = resolve_name(name)
    except Exception as error:  # someone else's module
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"policy {text!r}: cannot import {name}: {reason}; expected module:function") from error
    if not callable(function):
        raise ConfigError(f"policy {text!r}: {name} is {function!r}; expected a function of (job, state, device)")
    scored: ScoreFunction = function
    return scored


def _score(
    name: str, function: ScoreFunction, job: JobView, state: SchedulerState, device: DeviceState
) -> tuple[float, ...]:
    try:
        score = function(job, state, device)
    except Exception as error:  # someone else's code
        raise ConfigError(f"policy {name}: job {job.name!r}: {type(error).__name__}: {error}") from error
    values = score if isinstance(score, tuple) else (score,)
    if not all(isinstance(value, int | float) and not isnan(value) for value in values):
        raise ConfigError(f"policy {name}: job {job.name!r}: score {score!r}; expected a number or a tuple of numbers")
    return values


def rank_jobs(policy: Policy, state: SchedulerState, device: DeviceState) -> list[int]:
    """The numbers of the waiting jobs that may fit a bubble of the device, best first, then in order of submission.

    Raises:
        ConfigError: a score function failed, or returned an invalid score.
    """
    jobs = [job for job in state.jobs if job.fits(device)]
    scores = policy.scores(jobs, state, device)
    order = sorted(zip(scores, jobs, strict=True), key=lambda pair: (-pair[0], pair[1].submitted_s, pair[1].id))
    return [job.id for _, job in order]

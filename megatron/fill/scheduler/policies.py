"""Policies: score functions over (job, device states), higher first (PipeFill, section 4.4).

A score is a number or a tuple of numbers, compared from the left.  Only the order of one policy's scores counts: for
a weighted sum they become places among the jobs that wait for the device, from 1 for the best to 0 for the worst,
evenly spaced, equal ones alike.  So weights mean the same whatever the policies measure, and one outlier does not
flatten the rest.
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

DEFAULT_POLICY = "priority"  # first come, first served among equal ones
MOST_JOBS = 500  # that wait: of more, only the first submitted are weighed against each other


def fifo(job: JobView, state: SchedulerState, device: DeviceState) -> Score:
    """First come, first served."""
    return -job.submitted_s


def shortest_job_first(job: JobView, state: SchedulerState, device: DeviceState) -> Score:
    """The least processing time on this device first: the least mean time to completion on one device."""
    return -state.processing_s(job, device)


def makespan(job: JobView, state: SchedulerState, device: DeviceState) -> Score:
    """The end of all jobs together as early as possible.

    Jobs that would not be done earlier on another device (waiting for it included) come first, the longest of them
    leading (Graham's longest processing time first); then the others, the less delayed here the earlier.
    """
    here_s = state.done_s(job, device)
    elsewhere_s = min((state.done_s(job, other) for other in state.devices if other.name != device.name), default=inf)
    if here_s <= elsewhere_s:
        return (1.0, state.processing_s(job, device))
    return (0.0, elsewhere_s - here_s)


def deadline(job: JobView, state: SchedulerState, device: DeviceState) -> Score:
    """The earliest deadline first.

    Jobs that can still make it on this device come before those that cannot, and those before jobs without a deadline.
    """
    if job.deadline_s is None:
        return (0.0, 0.0)
    in_time = state.now_s + state.processing_s(job, device) <= job.deadline_s
    return (2.0 if in_time else 1.0, -job.deadline_s)


def priority(job: JobView, state: SchedulerState, device: DeviceState) -> Score:
    """The highest priority first."""
    return job.priority


def fair_share(job: JobView, state: SchedulerState, device: DeviceState) -> Score:
    """The user who had the least device time so far first."""
    return -state.used_s.get(job.user, 0.0)


POLICIES: dict[str, ScoreFunction] = {
    "fifo": fifo,
    "sjf": shortest_job_first,
    "makespan": makespan,
    "deadline": deadline,
    "priority": priority,
    "fair": fair_share,
}

# Their score of a job depends on nothing but the job and its processing time on the device, and never rises with that
# time.  So it does not change while the job waits, and jobs that differ in their work only have one order everywhere.
STEADY: frozenset[ScoreFunction] = frozenset({fifo, shortest_job_first, priority})

# They read ``SchedulerState.used_s``, which takes a look at every job; for other built-in policies it is left empty.
WEIGHS_USERS: frozenset[ScoreFunction] = frozenset({fair_share})


@dataclass(frozen=True, slots=True)
class Policy:
    """A weighted sum of score functions; its text form is ``0.7*sjf+0.3*deadline``."""

    terms: tuple[tuple[float, str, ScoreFunction], ...]

    def __str__(self) -> str:
        if len(self.terms) == 1:
            return self.terms[0][1]
        return "+".join(f"{weight!r}*{name}" for weight, name, _ in self.terms)

    @property
    def steady(self) -> bool:
        """Whether it is one of ``STEADY``: waiting jobs can be kept in order instead of being weighed at each claim."""
        return len(self.terms) == 1 and self.terms[0][2] in STEADY

    @property
    def weighs_users(self) -> bool:
        """Whether a term reads what each user has had: one of ``WEIGHS_USERS``, or a function that is not built in."""
        return not self.built_in or any(function in WEIGHS_USERS for _, _, function in self.terms)

    @property
    def built_in(self) -> bool:
        """Whether all of its score functions are PipeFill's own."""
        return all(function in POLICIES.values() for _, _, function in self.terms)

    @property
    def most_jobs(self) -> int | None:
        """How many of the jobs that wait it should be asked about, the first submitted; None for all of them."""
        return None if self.steady else MOST_JOBS

    def score_one(self, job: JobView, state: SchedulerState, device: DeviceState) -> tuple[float, ...]:
        """The score of one job as its only score function has it, comparable with that of other jobs.

        Raises:
            ConfigError: the score function failed, or returned what cannot be compared.
            ValueError: the policy is a sum: its places are those among all jobs.
        """
        if len(self.terms) != 1:
            raise ValueError(f"policy {self} is a sum; expected a single score function")
        _, name, function = self.terms[0]
        return _score(name, function, job, state, device)

    def scores(self, jobs: Sequence[JobView], state: SchedulerState, device: DeviceState) -> list[float]:
        """Per job, from 0 to the sum of the weights.

        Raises:
            ConfigError: a score function failed, or returned what cannot be compared.
        """
        total = [0.0] * len(jobs)
        for weight, name, function in self.terms:
            scores = [_score(name, function, job, state, device) for job in jobs]
            order = sorted(set(scores))
            places = {score: place / max(1, len(order) - 1) for place, score in enumerate(order)}
            total = [sum_ + weight * places[score] for sum_, score in zip(total, scores, strict=True)]
        return total


def parse_policy(text: str) -> Policy:
    """Read a policy: a name of ``POLICIES``, ``module:function``, or a weighted sum such as ``0.7*sjf+0.3*deadline``.

    A name without a weight has weight 1.

    Raises:
        ConfigError: with the text and what was expected.
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
    """As a tuple, so that it can be compared with another one."""
    try:
        score = function(job, state, device)
    except Exception as error:  # someone else's code
        raise ConfigError(f"policy {name}: job {job.name!r}: {type(error).__name__}: {error}") from error
    values = score if isinstance(score, tuple) else (score,)
    if not all(isinstance(value, int | float) and not isnan(value) for value in values):
        raise ConfigError(f"policy {name}: job {job.name!r}: score {score!r}; expected a number or a tuple of numbers")
    return values


def rank_jobs(policy: Policy, state: SchedulerState, device: DeviceState) -> list[int]:
    """The numbers of the jobs that wait, the one to run first leading.

    Equal ones come in the order of their submission.  Jobs known to fit no bubble of the device are left out.

    Raises:
        ConfigError: a score function failed, or returned what cannot be compared.
    """
    jobs = [job for job in state.jobs if job.fits(device)]
    scores = policy.scores(jobs, state, device)
    order = sorted(zip(scores, jobs, strict=True), key=lambda pair: (-pair[0], pair[1].submitted_s, pair[1].id))
    return [job.id for _, job in order]

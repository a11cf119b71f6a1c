"""Synthetic fill jobs without a trace: Poisson arrivals, heavy-tailed sizes.

- Arrivals are a Poisson process.  Its rate may follow the day: the mean times
  ``1 + daily * cos(2 pi (t - peak) / day)``.
- Sizes are seconds on an otherwise idle device: log-normal with a median and a sigma, and at most ``cap_s``.  With a
  sigma of 1.5 to 2 a few long jobs have most of the work, as in published traces of clusters.
- A share of the jobs has a deadline: its size times a factor, uniform between two bounds, after its arrival.
- Kinds are drawn by weight; users by Zipf's law: the n-th one with a weight of ``n ** -user_skew``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, inf, isfinite, log, pi, sin
from statistics import NormalDist
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from megatron.fill.wings.sim.cluster.rates import Rates
from megatron.fill.wings.sim.values import DeviceGroup, FillKind, RuntimeModel, SimJob

_DAY_S = 86400.0
_MOST_JOBS, _MOST_USERS = 10**7, 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class Generator:
    """Parameters of synthetic jobs.  Exactly one of ``jobs``, ``per_hour`` and ``load`` sets their number."""

    jobs: int | None = None  # number of jobs
    per_hour: float | None = None  # mean number of jobs per hour
    load: float | None = None  # mean total size of the jobs as a share of the fleet's capacity (``fill_capacity``)
    kinds: Mapping[str, float] = field(default_factory=dict)  # weights by name; empty for all kinds with equal weight
    median_s: float = 600.0  # median size, in seconds on an otherwise idle device
    sigma: float = 1.5  # standard deviation of the sizes' logarithm; 0 for equal sizes
    cap_s: float = inf  # maximum size in seconds
    # Amplitude of the daily rhythm: 0 for a constant rate, up to 1 for none at the quietest time of the day.
    daily: float = 0.0
    peak_s: float = 14 * 3600.0  # busiest time of the day
    deadline_share: float = 0.0  # share of jobs with a deadline
    deadline_factors: tuple[float, float] = (4.0, 20.0)  # minimum and maximum deadline, as multiples of the size
    users: int = 0  # number of users; 0 for jobs without a user
    user_skew: float = 1.0  # exponent of Zipf's law; 0 for equally active users
    seed: int = 0
    __pydantic_config__: ClassVar = {"extra": "forbid"}  # in a configuration file, a misspelt field is an error

    def __post_init__(self) -> None:
        given = [value for value in (self.jobs, self.per_hour, self.load) if value is not None]
        if len(given) != 1:
            raise ValueError(f"expected exactly one of jobs, per_hour and load; got {len(given)} of them")
        if not (given[0] > 0 and isfinite(given[0])):
            raise ValueError(f"jobs, per_hour or load is {given[0]}; expected a number above 0")
        for name, weight in self.kinds.items():
            if not 0 < weight < inf:
                raise ValueError(f"kinds: the weight of {name!r} is {weight}; expected a number above 0")
        least, most = self.deadline_factors
        for name, value, ok, expected in (
            ("median_s", self.median_s, 0 < self.median_s < inf, "a number above 0"),
            ("sigma", self.sigma, 0 <= self.sigma < 10, "0 to 10"),
            ("cap_s", self.cap_s, self.cap_s > 0, "a number above 0"),
            ("daily", self.daily, 0 <= self.daily <= 1, "0 to 1"),
            ("peak_s", self.peak_s, 0 <= self.peak_s <= _DAY_S, "a time of the day in seconds"),
            ("deadline_share", self.deadline_share, 0 <= self.deadline_share <= 1, "0 to 1"),
            ("deadline_factors", self.deadline_factors, 0 <= least <= most < inf, "the least and the most"),
            ("users", self.users, 0 <= self.users <= _MOST_USERS, f"0 to {_MOST_USERS}"),
            ("user_skew", self.user_skew, 0 <= self.user_skew < inf, "at least 0"),
            ("seed", self.seed, self.seed >= 0, "at least 0"),
        ):
            if not ok:
                raise ValueError(f"{name} is {value}; expected {expected}")

    @property
    def mean_s(self) -> float:
        """Mean size: of a log-normal distribution whose values above the cap are replaced by it."""
        mean_s = self.median_s * exp(self.sigma**2 / 2)
        if self.cap_s == inf or self.sigma == 0:
            return min(mean_s, self.cap_s)
        normal = NormalDist()
        place = log(self.cap_s / self.median_s) / self.sigma
        return mean_s * normal.cdf(place - self.sigma) + self.cap_s * (1 - normal.cdf(place))

    def rhythm_s(self, duration_s: float) -> float:
        """Seconds in which a constant rate yields as many jobs as the daily rhythm in its first ``duration_s``."""
        turn = 2 * pi / _DAY_S
        return duration_s + self.daily / turn * (sin(turn * (duration_s - self.peak_s)) + sin(turn * self.peak_s))


def generate(
    generator: Generator,
    kinds: Sequence[FillKind],
    duration_s: float,
    groups: Sequence[DeviceGroup] = (),
    runtime: RuntimeModel | None = None,
) -> tuple[SimJob, ...]:
    """Generate the jobs of the first ``duration_s``, by arrival; the same seed gives the same jobs.

    Args:
        groups: groups of devices that ``load`` refers to.
        runtime: their overheads.

    Raises:
        ValueError: a kind does not exist, ``load`` is set and no kind fits the devices, or there are too many jobs.
    """
    names, shares = _shares(generator, kinds)
    rates = {kind.name: kind.alone_rate for kind in kinds}
    random = np.random.default_rng(generator.seed)
    number = _count(generator, kinds, duration_s, groups, runtime, random)
    if number > _MOST_JOBS:
        raise ValueError(f"fill.generate makes {number} jobs; expected at most {_MOST_JOBS}")
    arrivals = np.sort(_arrivals(generator, number, duration_s, random))
    sizes = np.minimum(generator.median_s * np.exp(generator.sigma * random.standard_normal(number)), generator.cap_s)
    which = random.choice(len(names), size=number, p=shares)
    urgent = random.random(number) < generator.deadline_share
    deadlines = arrivals + sizes * random.uniform(*generator.deadline_factors, size=number)
    columns = [its.tolist() for its in (which, arrivals, sizes, deadlines, urgent)]
    jobs = zip(*columns, _users(generator, number, random), strict=True)
    return tuple(
        SimJob(
            id=one,
            name=f"{names[kind]}-{one}",
            kind=names[kind],
            arrival_s=arrival_s,
            work=size_s * rates[names[kind]],
            deadline_s=deadline_s if has_deadline else None,
            user=user,
        )
        for one, (kind, arrival_s, size_s, deadline_s, has_deadline, user) in enumerate(jobs)
    )


def fill_capacity(
    groups: Sequence[DeviceGroup],
    kinds: Sequence[FillKind],
    weights: Mapping[str, float] | None = None,
    runtime: RuntimeModel | None = None,
) -> float:
    """Estimated capacity of a fleet's resident seats, in seconds on idle devices per second.

    A device counts with the weighted harmonic mean, over the kinds that fit it, of the rate there relative to the rate
    alone: jobs of all kinds are equally large, so a slow kind takes a larger share of its time.
    """
    runtime = runtime or RuntimeModel()
    total = 0.0
    known: dict[object, float] = {}
    for group in groups:
        if group.cycle not in known:
            rates = Rates(group.cycle, kinds, runtime)
            fits = [
                ((weights or {}).get(kind.name, 0.0 if weights else 1.0), kind, rates.whole.fits[kind.name])
                for kind in kinds
                if kind.name in rates.whole.fits
            ]
            weight = sum(its for its, _, _ in fits)
            takes = sum(its * kind.alone_rate / rates.resident_rate(fit) for its, kind, fit in fits)
            known[group.cycle] = weight / takes if weight else 0.0
        total += group.count * known[group.cycle]
    return total


def _shares(generator: Generator, kinds: Sequence[FillKind]) -> tuple[list[str], list[float]]:
    known = [kind.name for kind in kinds]
    for name in generator.kinds:
        if name not in known:
            raise ValueError(f"kinds has {name!r}; expected some of {', '.join(known)}")
    weights = dict(generator.kinds) or dict.fromkeys(known, 1.0)
    total = sum(weights.values())
    return list(weights), [weight / total for weight in weights.values()]


def _count(
    generator: Generator,
    kinds: Sequence[FillKind],
    duration_s: float,
    groups: Sequence[DeviceGroup],
    runtime: RuntimeModel | None,
    random: np.random.Generator,
) -> int:
    if generator.jobs is not None:
        return generator.jobs
    if generator.per_hour is not None:
        per_s = generator.per_hour / 3600
    else:
        capacity = fill_capacity(groups, kinds, generator.kinds or None, runtime)
        if not capacity:
            raise ValueError("load: no kind fits the bubbles of any device; expected one that does")
        assert generator.load is not None
        per_s = generator.load * capacity / generator.mean_s
    return int(random.poisson(per_s * max(0.0, generator.rhythm_s(duration_s))))


def _arrivals(generator: Generator, number: int, duration_s: float, random: np.random.Generator) -> NDArray[np.float64]:
    """Draw arrivals by rejection: given their number, the arrivals of a Poisson process are independent."""
    if not generator.daily:
        return random.uniform(0.0, duration_s, number)
    found = np.empty(0)
    while len(found) < number:
        drawn = random.uniform(0.0, duration_s, 2 * (number - len(found)) + 16)
        rate = 1 + generator.daily * np.cos(2 * pi / _DAY_S * (drawn - generator.peak_s))
        found = np.concatenate([found, drawn[random.uniform(0.0, 1 + generator.daily, len(drawn)) < rate]])
    return found[:number]


def _users(generator: Generator, number: int, random: np.random.Generator) -> list[str]:
    if not generator.users:
        return [""] * number
    weights = np.arange(1, generator.users + 1, dtype=np.float64) ** -generator.user_skew
    return [
        f"user-{one + 1}" for one in random.choice(generator.users, size=number, p=weights / weights.sum()).tolist()
    ]

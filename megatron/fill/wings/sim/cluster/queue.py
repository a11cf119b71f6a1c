"""The waiting jobs, and the choice of a seat's next one by the scheduler's policies."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection
from heapq import heapify, heappop, heappush
from math import inf, isclose, nextafter

from megatron.fill.scheduler.policies import Policy, rank_jobs
from megatron.fill.scheduler.state import DeviceState, SchedulerState
from megatron.fill.wings.sim.cluster.fleet import FleetDevice
from megatron.fill.wings.sim.cluster.rates import Fit, Offer
from megatron.fill.wings.sim.cluster.sight import Sight, Waiting, view


class RankedQueue:
    """Ranks the jobs again for each seat with ``rank_jobs``; if the policy is not steady, only the oldest ones."""

    def __init__(self, policy: Policy, sight: Sight) -> None:
        self._policy = policy
        self._sight = sight
        self._most = inf if policy.most_jobs is None else policy.most_jobs
        self._first: list[tuple[float, int]] = []  # keys of the jobs that are ranked
        self._later: list[tuple[float, int]] = []  # keys of the other jobs, a heap
        self._jobs: dict[int, Waiting] = {}  # by id
        self._kinds: Counter[str] = Counter()  # number of ranked jobs per kind

    @property
    def kinds(self) -> Collection[str]:
        """Kinds of the jobs that a device would be offered now."""
        return self._kinds.keys()

    def add(self, waiting: Waiting) -> None:
        self._jobs[waiting.job.id] = waiting
        if len(self._first) >= self._most and waiting.key > self._first[-1]:
            heappush(self._later, waiting.key)
            return
        self._admit(waiting.key)
        if len(self._first) > self._most:
            heappush(self._later, self._dismiss(len(self._first) - 1))

    def take(self, device: FleetDevice, offer: Offer, now_s: float) -> Waiting:
        """Remove and return the job that this seat takes; at least one of ``kinds`` must fit the offer.

        Raises:
            ConfigError: a score function failed, or its results cannot be compared.
        """
        state, here = self._sight.state(device, offer, [self._jobs[number] for _, number in self._first], now_s)
        number = rank_jobs(self._policy, state, here)[0]
        self._dismiss(bisect_left(self._first, self._jobs[number].key))
        if self._later:
            self._admit(heappop(self._later))
        return self._jobs.pop(number)

    def _admit(self, key: tuple[float, int]) -> None:
        insort(self._first, key)
        self._kinds[self._jobs[key[1]].job.kind] += 1

    def _dismiss(self, place: int) -> tuple[float, int]:
        key = self._first.pop(place)
        kind = self._jobs[key[1]].job.kind
        self._kinds[kind] -= 1
        if not self._kinds[kind]:
            del self._kinds[kind]
        return key


class SteadyQueue:
    """A queue like ``RankedQueue``, which keeps the jobs of each kind in the order of a steady policy.

    It compares the first one of each; ``rank_jobs`` over all jobs would choose the same job.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._lines: dict[str, _Line] = {}

    @property
    def kinds(self) -> Collection[str]:
        return self._lines.keys()

    def add(self, waiting: Waiting) -> None:
        self._lines.setdefault(waiting.job.kind, _Line(self._policy)).add(waiting)

    def take(self, device: FleetDevice, offer: Offer, now_s: float) -> Waiting:
        heads = [line.head(fit) for kind, line in self._lines.items() if (fit := offer.fits.get(kind)) is not None]
        _, _, (score, first) = min(heads, key=lambda head: (head[0], head[1]))
        line = self._lines[first.job.kind]
        line.remove(score, first)
        if not line:
            del self._lines[first.job.kind]
        return first


_HERE = DeviceState("here")

# A job's negated score in a seat, its key, and its score in its line, by which it is removed.
type _Head = tuple[float, tuple[float, int], tuple[float, Waiting]]


class _Line:
    """The jobs of one kind, by their score on a device that does one unit of work per second.

    Their order on other devices is the same, except that scores differing by a rounding error here may be equal there.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heads: dict[float, _Head] = {}  # by seconds per unit of work; cleared when the line changes
        self._scores: list[float] = []  # a heap of negated scores, the best first
        self._jobs: dict[float, list[tuple[tuple[float, int], Waiting]]] = {}  # a heap per score

    def __bool__(self) -> bool:
        return bool(self._scores)

    def add(self, waiting: Waiting) -> None:
        self._heads.clear()
        score = self._score(waiting, 1.0)
        if score not in self._jobs:
            self._jobs[score] = []
            heappush(self._scores, score)
        heappush(self._jobs[score], (waiting.key, waiting))

    def head(self, fit: Fit) -> _Head:
        """The job of this line that ranks first in the given seat."""
        if fit.unit_s not in self._heads:
            self._heads[fit.unit_s] = self._head(fit)
        return self._heads[fit.unit_s]

    def _head(self, fit: Fit) -> _Head:
        first_score = self._scores[0]
        key, first = self._jobs[first_score][0]
        found = (self._score(first, fit.unit_s), key, (first_score, first))
        passed = []
        while self._next_is_close():
            passed.append(heappop(self._scores))
            key, other = self._jobs[self._scores[0]][0]
            found = min(found, (self._score(other, fit.unit_s), key, (self._scores[0], other)), key=lambda its: its[:2])
        for score in passed:
            heappush(self._scores, score)
        return found

    def remove(self, score: float, waiting: Waiting) -> None:
        self._heads.clear()
        jobs = self._jobs[score]
        assert heappop(jobs)[1] is waiting
        if not jobs:
            del self._jobs[score]
            if self._scores[0] == score:
                heappop(self._scores)
            else:
                self._scores.remove(score)
                heapify(self._scores)

    def _next_is_close(self) -> bool:
        """True if the second-best score may equal the best one on some device."""
        rest = self._scores[1:3]
        return bool(rest) and isclose(min(rest), self._scores[0], rel_tol=1e-14, abs_tol=nextafter(0.0, 1.0))

    def _score(self, waiting: Waiting, unit_s: float) -> float:
        job = view(waiting, {_HERE.name: unit_s * waiting.left})
        return -self._policy.score_one(job, SchedulerState(0.0, (_HERE,), (job,)), _HERE)[0]

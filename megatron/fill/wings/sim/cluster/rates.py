"""Rates of fill jobs on a device, alone in its bubbles or next to another job: the planner's results, cached.

A device has the seats of a rank's agent (``agent/agent.py``): the resident job gets every bubble first, the tail job
the time that the resident one's plan leaves.  Each job holds its memory permanently.  A resident job that comes to a
device with a tail job thus plans for bubbles with less free memory, and a tail job is accepted only if one of its
configurations fits next to the resident job in every bubble, as in ``agent/ranking.py``.  A job that asks for an amount
of memory gets that amount.  A tail job keeps its initial configuration: its rate falls next to another resident job,
and it gets whole bubbles while there is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron.fill.planner.held import held_cycle, leftover, processing_time_s, room_bytes
from megatron.fill.planner.plan import ExecutionPlan
from megatron.fill.planner.search import lay
from megatron.fill.profiles import BubbleCycle, Configuration, JobProfile
from megatron.fill.wings.sim.values import FillKind, RuntimeModel


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """A kind of job in a seat, with its plan there."""

    kind: str
    plan: ExecutionPlan
    profile: JobProfile
    memory_bytes: int  # memory that the job holds there, or that it asked for
    unit_s: float  # seconds per unit of work there, as the scheduler estimates it (``planner.search.unit_s``)


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """A free seat's offer: the kinds of jobs that fit it."""

    fits: Mapping[str, Fit]


class Rates:
    """Rates in one bubble cycle; each is computed once.

    Args:
        cycle: bubbles of the device.  A job holds its memory in all of them, so the smallest free memory counts, minus
            the margin.
        kinds: kinds of jobs that may arrive.
    """

    def __init__(self, cycle: BubbleCycle, kinds: Sequence[FillKind], runtime: RuntimeModel) -> None:
        self.cycle = held_cycle(cycle, room_bytes(cycle, runtime.margin_bytes))
        self._kinds = [_slowed(kind, runtime.step_efficiency) for kind in kinds]
        self._runtime = runtime
        self._residents: dict[int, Offer] = {}  # by the memory of the tail job
        self._tails: dict[Fit, Offer] = {}
        self._leftovers: dict[Fit, BubbleCycle] = {}
        self._rates: dict[tuple[str, Configuration, Fit | None], float] = {}
        # Equal ones are shared: otherwise residents next to tails next to residents would multiply without end.
        self._fits: dict[tuple[str, ExecutionPlan, float], Fit] = {}
        self._offers: dict[tuple[Fit, ...], Offer] = {}
        self.whole = self.resident_offer(None)

    def resident_offer(self, tail: Fit | None) -> Offer:
        """Return the resident seat's offer next to a tail job; None for an empty tail seat."""
        taken_bytes = 0 if tail is None else tail.memory_bytes
        if taken_bytes not in self._residents:
            self._residents[taken_bytes] = self._offer(_less_memory(self.cycle, taken_bytes), tail=False)
        return self._residents[taken_bytes]

    def tail_offer(self, resident: Fit) -> Offer:
        """Return the tail seat's offer next to a resident job."""
        if resident not in self._tails:
            self._tails[resident] = self._offer(self._leftover(resident), tail=True)
        return self._tails[resident]

    def resident_rate(self, fit: Fit) -> float:
        """Work per second of a resident job."""
        return self._work_per_s(fit.plan, self.cycle)

    def tail_rate(self, fit: Fit, resident: Fit | None) -> float:
        """Work per second of a tail job in its configuration; 0 if the resident job leaves too little.

        ``resident`` is None while none serves bubbles.
        """
        key = (fit.kind, fit.profile.configuration, resident)
        if key not in self._rates:
            cycle = self.cycle if resident is None else self._leftover(resident)
            plan = lay(cycle, fit.profile, self._runtime.reserve_ns)
            self._rates[key] = 0.0 if plan is None else self._work_per_s(plan, cycle)
        return self._rates[key]

    def _leftover(self, resident: Fit) -> BubbleCycle:
        if resident not in self._leftovers:
            self._leftovers[resident] = leftover(self.cycle, resident.plan, resident.profile, resident.memory_bytes)
        return self._leftovers[resident]

    def _offer(self, cycle: BubbleCycle, tail: bool) -> Offer:
        fits, most_bytes = [], room_bytes(cycle, 0)
        for kind in self._kinds:
            if tail and min(profile.memory_bytes for profile in kind.profiles) > most_bytes:
                continue
            plan = kind.plan(cycle, self._runtime.reserve_ns)
            if plan is None:
                continue
            unit_s = processing_time_s(cycle, plan, 1.0)
            profile = next(one for one in kind.profiles if one.configuration == plan.configuration)
            memory_bytes = profile.memory_bytes if kind.memory_bytes is None else kind.memory_bytes
            fit = Fit(kind.name, plan, profile, memory_bytes, unit_s)
            fits.append(self._fits.setdefault((kind.name, plan, unit_s), fit))
        return self._offers.setdefault(tuple(fits), Offer({fit.kind: fit for fit in fits}))

    def _work_per_s(self, plan: ExecutionPlan, cycle: BubbleCycle) -> float:
        return plan.work_per_cycle / cycle.period_ns * 1e9 * self._runtime.harvest


def _slowed(kind: FillKind, step_efficiency: float) -> FillKind:
    """Return the kind with its steps slowed down as in bubbles; its rate alone is unchanged."""
    if step_efficiency == 1:
        return kind
    profiles = []
    for profile in kind.profiles:
        nodes = tuple(replace(node, duration_ns=round(node.duration_ns / step_efficiency)) for node in profile.nodes)
        profiles.append(replace(profile, nodes=nodes))
    return replace(kind, profiles=tuple(profiles))


def _less_memory(cycle: BubbleCycle, taken_bytes: int) -> BubbleCycle:
    slots = [replace(slot, free_bytes=max(0, slot.free_bytes - taken_bytes)) for slot in cycle.slots]
    return BubbleCycle(cycle.period_ns, tuple(slots))

"""The assignment of a job's nodes to a bubble cycle, and the choice of its configuration (PipeFill, section 4.3,
Algorithm 1).

With a fixed order of nodes, the greedy assignment (as many as fit into each bubble) is optimal.  Number the nodes from
the job's start on, and let ``reach(p)`` be the first node left after a bubble that begins at node ``p``.  It is
monotone: ``reach(p) <= reach(q)`` for ``p <= q``, because nodes from ``p`` to beyond ``q`` that fit still fit without
those before ``q``, in time and in memory.  So a job that leaves a bubble early never gets ahead of one that does not.

A whole cycle is then a function of the node at which it begins, so after at most as many cycles as there are nodes a
cycle begins where an earlier one did, and the plan repeats.  That function is monotone on a circle: it has the same
rate in the long run (its rotation number) from every start.  So the plan that a job reaches from node 0 is optimal too.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

from megatron.fill.display import mib, size
from megatron.fill.errors import PlanError
from megatron.fill.planner.held import RESERVE_NS, held_cycle, processing_time_s, room_bytes
from megatron.fill.planner.plan import ExecutionPlan
from megatron.fill.profiles import BubbleCycle, BubbleSlot, JobProfile, NodeProfile

if TYPE_CHECKING:  # it is large, and of the agents only those of planned jobs need it
    import numpy as np
    from numpy.typing import NDArray

type _Counts = NDArray[np.int64]


def best_plan(cycle: BubbleCycle, profiles: Sequence[JobProfile], reserve_ns: int = 0) -> ExecutionPlan:
    """Return the plan with the most work per cycle; among equal ones the one with the least memory, then the first.

    Args:
        profiles: profiles of one job, one for each configuration.
        reserve_ns: time of each bubble that is reserved for wake-up and pause.

    Raises:
        PlanError: no configuration fits; the message names the node and the bubble that come closest, and the excess.
    """
    plan = find_plan(cycle, profiles, reserve_ns)
    if plan is None:
        raise PlanError(_why_nothing_fits(cycle, profiles, reserve_ns))
    return plan


def plan_job(cycle: BubbleCycle, profiles: Sequence[JobProfile], job_bytes: int | None) -> ExecutionPlan:
    """Return the ``best_plan`` of a job as the runtime makes it: with its reserve, and within its worker's memory.

    That is the least memory of the cycle, or the ``job_bytes`` that the job asks for, if any and if that is less.

    Raises:
        PlanError: no configuration fits.
    """
    least_bytes = min((profile.memory_bytes for profile in profiles), default=0)
    if cycle.slots and job_bytes is not None and job_bytes < least_bytes:
        raise PlanError(f"it asks for {mib(job_bytes)} and needs at least {mib(least_bytes)}")
    return best_plan(held_cycle(cycle, room_bytes(cycle, 0), job_bytes), profiles, RESERVE_NS)


def find_plan(cycle: BubbleCycle, profiles: Sequence[JobProfile], reserve_ns: int = 0) -> ExecutionPlan | None:
    """Return ``best_plan``, or None if no configuration fits."""
    usable = [(slot.duration_ns - reserve_ns, slot.free_bytes) for slot in cycle.slots if slot.duration_ns > reserve_ns]
    limits = [_limit(usable, profile) for profile in profiles]
    found: dict[int, ExecutionPlan] = {}
    best = 0.0
    for number in sorted(range(len(profiles)), key=lambda number: -limits[number]):
        if limits[number] < best:  # the remaining limits are no larger
            break
        if plan := lay(cycle, profiles[number], reserve_ns):
            found[number] = plan
            best = max(best, plan.work_per_cycle)
    if not found:
        return None
    return found[max(found, key=lambda number: (found[number].work_per_cycle, -profiles[number].memory_bytes, -number))]


def unit_s(cycle: BubbleCycle | None, profiles: Sequence[JobProfile], reserve_ns: int = 0) -> float | None:
    """Return the wall-clock seconds that a device takes for one unit of a job's work.

    Infinity if the job fits no bubble; None before the device's cycle or the job (no profiles) is measured.
    """
    if cycle is None or not profiles:
        return None
    plan = find_plan(cycle, profiles, reserve_ns)
    return inf if plan is None else processing_time_s(cycle, plan, 1.0)


def _limit(usable: Sequence[tuple[int, int]], profile: JobProfile) -> float:
    """Return an upper bound on the work per cycle: all bubbles with memory for any node full, and some for rounding."""
    least = min(node.memory_bytes for node in profile.nodes)
    room_ns = sum(duration_ns for duration_ns, free_bytes in usable if free_bytes >= least)
    return room_ns / profile.duration_ns * profile.work * (1 + 1e-9) if profile.duration_ns else inf


def lay(cycle: BubbleCycle, profile: JobProfile, reserve_ns: int = 0) -> ExecutionPlan | None:
    """Return the best plan for one configuration, None if a node fits no bubble; PlanError if all nodes take 0 ns."""
    if profile.duration_ns == 0:
        raise PlanError(f"{profile.configuration}: all nodes take 0 ns; expected a measured profile")
    import numpy as np

    tables = _tables(cycle, profile, reserve_ns)
    nodes = len(profile.nodes)
    after = np.arange(nodes)
    for table in tables:
        after = after + table[after % nodes]
    if not tables or (after == np.arange(nodes)).any():  # at such a node, no bubble of the cycle takes the next one
        return None
    ends: list[int] = (after % nodes).tolist()
    starts = _repeating(ends)
    at = np.array(starts)
    columns = []
    for table in tables:
        columns.append(table[at % nodes])
        at = at + columns[-1]
    counts = tuple(map(tuple, np.stack(columns, axis=1).tolist()))
    return ExecutionPlan(profile.configuration, nodes, profile.work, starts[0], counts, reserve_ns)


def _repeating(ends: Sequence[int]) -> list[int]:
    """Follow ``ends`` from node 0; return the first nodes of the cycles that repeat."""
    seen: dict[int, None] = {}
    node = 0
    while node not in seen:
        seen[node] = None
        node = ends[node]
    order = list(seen)
    return order[order.index(node) :]


def _tables(cycle: BubbleCycle, profile: JobProfile, reserve_ns: int) -> list[_Counts]:
    """Return for each bubble the number of nodes that fit into it, by first node."""
    import numpy as np

    nodes = len(profile.nodes)
    first = np.arange(nodes)
    durations = np.array([node.duration_ns for node in profile.nodes], dtype=np.int64)
    memory = np.array([node.memory_bytes for node in profile.nodes], dtype=np.int64)
    ends = np.concatenate([[0], np.cumsum(np.tile(durations, 2))])  # two iterations: a chunk may wrap around

    @functools.cache
    def counts(usable_ns: int, free_bytes: int) -> _Counts:
        if usable_ns <= 0:
            return np.zeros_like(first)
        iterations, rest_ns = divmod(usable_ns, profile.duration_ns)
        reached = np.searchsorted(ends, ends[:nodes] + rest_ns, side="right") - 1
        count = iterations * nodes + reached - first
        too_large = np.flatnonzero(memory > free_bytes)
        if len(too_large):
            following = np.append(too_large, too_large[0] + nodes)  # the last one follows after wrapping around
            count = np.minimum(count, following[np.searchsorted(too_large, first)] - first)
        return count

    return [counts(slot.duration_ns - reserve_ns, slot.free_bytes) for slot in cycle.slots]


def _why_nothing_fits(cycle: BubbleCycle, profiles: Sequence[JobProfile], reserve_ns: int) -> str:
    """Return, in one line, the worst node of the configuration that comes closest, and the bubble that fits it best."""
    if not profiles:
        return "the job has no profile; expected one for at least one configuration"
    if not cycle.slots:
        return "the cycle has no bubbles; expected at least one"
    longest_ns = max(slot.duration_ns for slot in cycle.slots)
    if longest_ns <= reserve_ns:
        reserved = f"the {_ms(reserve_ns)} that each one reserves"
        return f"the longest bubble is {_ms(longest_ns)}; expected more than {reserved}"

    def least_excess(node: NodeProfile) -> float:
        return min(_excess(node, slot, reserve_ns) for slot in cycle.slots)

    worst = [(profile, max(profile.nodes, key=least_excess)) for profile in profiles]
    return _explain(cycle, *min(worst, key=lambda misfit: least_excess(misfit[1])), reserve_ns)


def _excess(node: NodeProfile, slot: BubbleSlot, reserve_ns: int) -> float:
    """Return the excess in time or in memory, the larger one, as a share of the bubble; at most 0 if the node fits."""
    usable_ns = slot.duration_ns - reserve_ns
    time = node.duration_ns / usable_ns - 1 if usable_ns > 0 else inf
    memory = node.memory_bytes / slot.free_bytes - 1 if slot.free_bytes else inf * node.memory_bytes
    return max(time, memory)


def _explain(cycle: BubbleCycle, profile: JobProfile, node: NodeProfile, reserve_ns: int) -> str:
    bubble, slot = min(enumerate(cycle.slots), key=lambda one: _excess(node, one[1], reserve_ns))
    usable_ns = max(0, slot.duration_ns - reserve_ns)
    too_much = []
    if node.duration_ns > usable_ns:
        too_much.append(f"{_ms(node.duration_ns - usable_ns)} too long")
    if node.memory_bytes > slot.free_bytes:
        too_much.append(f"{size(node.memory_bytes - slot.free_bytes)} too large")
    reserved = f" with {_ms(reserve_ns)} reserved" if reserve_ns else ""
    return (
        f"node {node.name!r} of {profile.configuration} ({_ms(node.duration_ns)}, {size(node.memory_bytes)}) is"
        f" {' and '.join(too_much)} for bubble {bubble} ({slot.kind}, {_ms(slot.duration_ns)}{reserved},"
        f" room for {size(slot.free_bytes)}), which fits it best"
    )


def _ms(duration_ns: int) -> str:
    return f"{duration_ns / 1e6:.3f} ms"

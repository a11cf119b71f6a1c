"""The execution plan: the assignment of a job's nodes to bubbles (PipeFill, section 4.3, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from megatron.fill.profiles import BubbleCycle, Configuration, JobProfile, is_amount, whole

_MAJOR = 0.1  # share of the cycle's bubble time from which on a bubble is checked for drift
_MOST_COUNT = 1 << 50  # largest integer accepted in a plan that is read from a file


@dataclass(frozen=True, slots=True)
class Chunk:
    """The nodes of one bubble: ``count`` of them from node ``first`` on; node 0 follows the last one."""

    cycle: int
    bubble: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """The number of nodes in each bubble, over the cycles after which the plan repeats.

    The nodes have one order, iteration after iteration, so the counts determine which node runs where.  The text form
    has a line for each cycle, with its first node and the count of each bubble:

        b8: 12 nodes do 64.0 work; a bubble's first 0 ns are reserved; 2 cycles:
        node 4: 3 0 2 5
        node 2: 7 0 2 5
    """

    configuration: Configuration
    nodes: int  # number of nodes in an iteration of the job
    work: float  # work of an iteration, in the job's unit
    first_node: int  # node at which the first cycle begins; a job that begins at node 0 gets there after some cycles
    counts: tuple[tuple[int, ...], ...]  # number of nodes by cycle and bubble
    reserve_ns: int = 0  # time of each bubble with nodes that is reserved for wake-up and pause

    def __post_init__(self) -> None:
        laid = sum(map(sum, self.counts))
        ok = (
            0 <= self.first_node < self.nodes
            and self.work > 0
            and self.reserve_ns >= 0
            and len({len(row) for row in self.counts}) == 1
            and all(count >= 0 for row in self.counts for count in row)
            and laid > 0
            and laid % self.nodes == 0
        )
        if not ok:
            raise ValueError(f"expected whole iterations over cycles of as many bubbles each; got\n{self}")

    @property
    def cycles(self) -> int:
        """The number of cycles after which the plan repeats."""
        return len(self.counts)

    @property
    def iterations(self) -> int:
        """The number of iterations of the job in ``cycles`` cycles."""
        return sum(map(sum, self.counts)) // self.nodes

    @property
    def work_per_cycle(self) -> float:
        """The long-run work per cycle, in the job's unit; the same from any start."""
        return self.iterations * self.work / self.cycles

    def chunks(self) -> Iterator[Chunk]:
        """Yield the chunks of the bubbles that have nodes, in order."""
        node = self.first_node
        for cycle, row in enumerate(self.counts):
            for bubble, count in enumerate(row):
                if count:
                    yield Chunk(cycle, bubble, node, count)
                node = (node + count) % self.nodes

    def durations_ns(self, profile: JobProfile) -> Iterator[int]:
        """Yield the duration in ns of each of the ``chunks``."""
        ends = list(accumulate((node.duration_ns for node in profile.nodes), initial=0))
        for chunk in self.chunks():
            iterations, last = divmod(chunk.first + chunk.count, len(profile.nodes))
            yield iterations * ends[-1] + ends[last] - ends[chunk.first]

    def __str__(self) -> str:
        lines = [
            f"{self.configuration}: {self.nodes} nodes do {self.work!r} work; a bubble's first {self.reserve_ns} ns are"
            f" reserved; {self.cycles} cycles:"
        ]
        node = self.first_node
        for row in self.counts:
            lines.append(f"node {node}: " + " ".join(map(str, row)))
            node = (node + sum(row)) % max(1, self.nodes)
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON data."""
        return {
            "configuration": str(self.configuration),
            "nodes": self.nodes,
            "work": self.work,
            "first_node": self.first_node,
            "counts": [list(row) for row in self.counts],
            "reserve_ns": self.reserve_ns,
        }

    @classmethod
    def from_dict(cls, data: Any) -> ExecutionPlan:
        """Return a plan from the data of ``to_dict``, which a job may have written; ValueError if it is none."""
        try:
            work, counts = data["work"], data["counts"]
            if not is_amount(work):
                raise ValueError(f"work is {work!r:.40}; expected a number above 0")
            if not isinstance(counts, list) or not all(isinstance(row, list) for row in counts):
                raise ValueError("counts is not a list of lists")
            return cls(
                Configuration.parse(data["configuration"]),
                whole(data["nodes"], _MOST_COUNT, "nodes"),
                float(work),
                whole(data["first_node"], _MOST_COUNT, "first_node"),
                tuple(tuple(whole(count, _MOST_COUNT, "a count") for count in row) for row in counts),
                whole(data["reserve_ns"], _MOST_COUNT, "reserve_ns"),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not an execution plan: {type(error).__name__}: {error}") from error


def drifted(planned: BubbleCycle, measured: BubbleCycle, tolerance: float = 0.2) -> bool:
    """True if a plan for the cycle ``planned`` should be replaced by one for the cycle ``measured``.

    That is so if the number or the kinds of the bubbles differ, if a bubble's free memory has fallen by more than the
    share ``tolerance``, or if the period, the bubble time, or a bubble with at least a tenth of it has changed by more
    than that share.
    """
    if [slot.kind for slot in planned.slots] != [slot.kind for slot in measured.slots]:
        return True
    pairs = list(zip(planned.slots, measured.slots, strict=True))
    if any(new.free_bytes < (1 - tolerance) * old.free_bytes for old, new in pairs):
        return True
    times = [(planned.period_ns, measured.period_ns), (planned.bubble_ns, measured.bubble_ns)]
    major_ns = _MAJOR * max(planned.bubble_ns, measured.bubble_ns)
    times += [
        (old.duration_ns, new.duration_ns) for old, new in pairs if max(old.duration_ns, new.duration_ns) >= major_ns
    ]
    return any(abs(new - old) > tolerance * old for old, new in times)

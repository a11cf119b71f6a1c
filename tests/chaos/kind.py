"""What a kind of fault is: its name, who commits it, and what must come of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from megatron.fill.types import JobState

MIB = 1 << 20
DISK = "disk"  # of the run's own
NETWORK = "network"  # of the run's own


class Source(StrEnum):
    """Who makes a fault."""

    TASK = "task"  # a side task, by itself
    ATTACK = "attack"  # a side task, against what is not its own
    BROUGHT = "brought"  # what a job brings along: its environment, its command
    VICTIM = "victim"  # the driver, to an honest side task
    DRIVER = "driver"  # the driver, to agents, store, clock or disk
    GPU = "gpu"  # a side task, on a GPU


@dataclass(frozen=True, slots=True)
class FaultKind:
    """One kind of fault.

    Attributes:
        name: stable: it stands in results and on the command line.
        state: the state that a job with this fault ends in.
        reason: a regular expression that is found in the job's reason.
        weight: how often it comes compared with others.
        exact: the job must have done its work exactly once.
        memory_bytes: the job's cap.
        refused: what it tries must not succeed; its own marks tell.
        either: it may end in ``state``, or as FAILED with any reason: it depends on when it is caught.
        needs: what the run must have of its own, where only root can make it: ``DISK``, ``NETWORK``, or nothing.
        open: why nothing keeps it in yet; such a kind is run only if it is named. Empty for all others.
        alone: it costs time beside the training by its nature, so its window is compared with none.
    """

    name: str
    what: str
    source: Source = Source.TASK
    state: JobState = JobState.FAILED
    reason: str = ""
    weight: float = 1.0
    exact: bool = False
    memory_bytes: int = 512 * MIB
    refused: bool = False
    either: bool = False
    needs: str = ""
    alone: bool = False
    open: str = ""

    @property
    def expected(self) -> str:
        """In a few words: what must come of it."""
        if self.source is Source.DRIVER:
            return "jobs and training go on"
        parts = ["refused"] if self.refused else []
        ends = f"{self.state} or FAILED" if self.either and self.state is not JobState.FAILED else str(self.state)
        parts.append(ends + (", work done once" if self.exact else ""))
        return "; ".join(parts)


def attack(
    name: str,
    what: str,
    *,
    refused: bool = False,
    either: bool = False,
    exact: bool = True,
    weight: float = 0.5,
    needs: str = "",
) -> FaultKind:
    """What a job tries, and goes on with its work after; not ``exact`` where it spoils what counts that work."""
    return FaultKind(
        name,
        what,
        Source.ATTACK,
        JobState.SUCCEEDED,
        weight=weight,
        exact=exact,
        refused=refused,
        either=either,
        needs=needs,
    )


def fatal(name: str, what: str, reason: str = "", *, memory_bytes: int = 512 * MIB, weight: float = 0.5) -> FaultKind:
    """What a job tries, and is ended for."""
    return FaultKind(name, what, Source.ATTACK, JobState.FAILED, reason, weight=weight, memory_bytes=memory_bytes)

"""A kind of fault: its name, its source, and the outcome that it must have."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from megatron.fill.types import JobState

MIB = 1 << 20
DISK = "disk"  # of the run's own
NETWORK = "network"  # of the run's own


class Source(StrEnum):
    """The origin of a fault."""

    TASK = "task"  # a side task, by itself
    ATTACK = "attack"  # a side task, against what is not its own
    BROUGHT = "brought"  # what a job brings along: its environment, its command
    VICTIM = "victim"  # the driver, to an honest side task
    DRIVER = "driver"  # the driver, to agents, store, clock or disk
    GPU = "gpu"  # a side task, on a GPU


@dataclass(frozen=True, slots=True)
class FaultKind:
    """A kind of fault.

    Attributes:
        name: stable, as it appears in results and on the command line.
        state: state that a job with this fault ends in.
        reason: regular expression that the job's reason must match.
        weight: frequency relative to other kinds.
        exact: the job must have done its work exactly once.
        memory_bytes: the job's memory cap.
        refused: the attempt must be refused; the job's marks show if it was.
        either: the job may end in ``state``, or as FAILED with any reason, depending on when it is caught.
        needs: resource of the run's own that only root can create: ``DISK``, ``NETWORK`` or nothing.
        open: reason why nothing prevents it yet; such a kind runs only if it is named. Empty for all others.
        alone: it costs the training time by its nature, so its window is compared with none.
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
        """The expected outcome, in a few words."""
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
    """An attack after which the job continues; not ``exact`` where the attack damages the count of its work."""
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
    """An attack that the job is ended for."""
    return FaultKind(name, what, Source.ATTACK, JobState.FAILED, reason, weight=weight, memory_bytes=memory_bytes)

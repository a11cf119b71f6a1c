"""The durations of the parts of an iteration, stage by stage, in nanoseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class StageCost:
    """The durations of one microbatch's passes on a virtual stage."""

    forward_ns: int
    backward_ns: int  # backward pass, both parts
    weight_ns: int = 0  # part of ``backward_ns`` for the weights' gradients, needed by schedules that split the pass

    def __post_init__(self) -> None:
        if not (self.forward_ns >= 0 and self.backward_ns >= self.weight_ns >= 0):
            raise ValueError(f"expected no negative time, and a weight part within the backward pass; got {self}")


@dataclass(frozen=True, slots=True)
class PipelineCosts:
    """The durations of the parts of an iteration."""

    stages: tuple[StageCost, ...]  # costs of each virtual stage, in the order ``chunk * ranks + rank``
    p2p_ns: int = 0  # duration of a transfer between two ranks, once both are ready
    # Time per rank from its last pass until its gradients are reduced over its data-parallel group, without the part
    # that overlaps with passes.
    reduce_ns: tuple[int, ...] = (0,)
    # Time per rank from the collective that all stages join (the gradient norm) to the first forward of the next
    # iteration: the optimizer's step, gathering the weights, loading data.
    optimizer_ns: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        if not self.reduce_ns or len(self.reduce_ns) != len(self.optimizer_ns):
            reduce, optimizer = len(self.reduce_ns), len(self.optimizer_ns)
            raise ValueError(f"{reduce} reduce_ns and {optimizer} optimizer_ns; expected one per rank each")
        if not self.stages or len(self.stages) % self.ranks:
            raise ValueError(f"{len(self.stages)} virtual stages on {self.ranks} ranks; expected as many on each")
        if min(self.p2p_ns, *self.reduce_ns, *self.optimizer_ns) < 0:
            raise ValueError(f"expected no negative time; got {self}")

    @property
    def ranks(self) -> int:
        return len(self.reduce_ns)

    @property
    def chunks(self) -> int:
        """The number of virtual stages per rank."""
        return len(self.stages) // self.ranks

    @classmethod
    def uniform(
        cls,
        ranks: int,
        forward_ns: int,
        backward_ns: int,
        weight_ns: int = 0,
        chunks: int = 1,
        p2p_ns: int = 0,
        reduce_ns: int = 0,
        optimizer_ns: int = 0,
    ) -> PipelineCosts:
        """Costs that are equal for all virtual stages and ranks; pass times are those of one virtual stage."""
        stage = StageCost(forward_ns, backward_ns, weight_ns)
        return cls((stage,) * (ranks * chunks), p2p_ns, (reduce_ns,) * ranks, (optimizer_ns,) * ranks)

    def slowed(self, rank: int, factor: float, held: Sequence[int] | None = None) -> PipelineCosts:
        """Costs with a straggler: all computation of the rank takes ``factor`` times as long, but its reduction.

        Args:
            held: virtual stages of the rank; None for Megatron's placement.

        Raises:
            ValueError: there is no such rank, or the factor is not positive.
        """
        if not 0 <= rank < self.ranks or factor <= 0:
            raise ValueError(f"rank {rank} slowed {factor} times; expected 0 to {self.ranks - 1} and a positive factor")
        stages = list(self.stages)
        for virtual in range(rank, len(stages), self.ranks) if held is None else held:
            stage = stages[virtual]
            weight_ns = round(stage.weight_ns * factor)
            input_ns = round((stage.backward_ns - stage.weight_ns) * factor)
            stages[virtual] = StageCost(round(stage.forward_ns * factor), input_ns + weight_ns, weight_ns)
        optimizer_ns = list(self.optimizer_ns)
        optimizer_ns[rank] = round(optimizer_ns[rank] * factor)
        return replace(self, stages=tuple(stages), optimizer_ns=tuple(optimizer_ns))

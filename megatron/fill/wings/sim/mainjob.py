"""Analytic main job: the costs of its passes, its memory, its timeline, and the resulting bubbles of its devices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megatron.fill.pipeline.bubbles import bubble_cycle, bubble_share, peak_activation_bytes
from megatron.fill.pipeline.costs import PipelineCosts
from megatron.fill.pipeline.schedule import Schedule
from megatron.fill.pipeline.timeline import Timeline, simulate
from megatron.fill.wings.mainjob.analytic import CostModel
from megatron.fill.wings.mainjob.hardware import GIB, GpuKind, Network
from megatron.fill.wings.mainjob.memory import StageMemory, activation_bytes, stage_memory
from megatron.fill.wings.mainjob.model import ModelSpec
from megatron.fill.wings.mainjob.order import order_of
from megatron.fill.wings.mainjob.parallel import Parallel
from megatron.fill.wings.sim.values import DeviceGroup


@dataclass(frozen=True, slots=True)
class MainJob:
    """A pipeline-parallel training on a cluster.

    Attributes:
        efficiency: achieved fraction of ``GpuKind.peak_flops`` in a pass's computation, in any precision; communication
            is added.
        memory_reserve_bytes: memory per GPU outside the accounting: CUDA context, NCCL's buffers, workspaces, and the
            allocator's waste.  The default is an assumption.
        overlap_grad_reduce: share of the gradients' reduction that overlaps with passes.
        optimizer_passes_bytes: memory traffic of the optimizer per parameter: the gradient norm reads gradients (4),
            Adam reads gradients, weights and two moments (16) and writes the moments and the weights in both precisions
            (14), and gradients are set to zero (4).
        offload_optimizer: True if the optimizer's state is in host memory except during its step (PipeFill, section
            4.1), so that bubbles can use its memory.  The copies are assumed to take no time.
        rendezvous: True if a send waits for its receiver, as with gloo.
        stragglers: factors of the stages whose passes take longer.
    """

    name: str
    model: ModelSpec
    gpu: GpuKind
    network: Network
    parallel: Parallel
    efficiency: float = 0.45
    memory_reserve_bytes: int = 2 * GIB
    overlap_grad_reduce: float = 0.0
    optimizer_passes_bytes: float = 38.0
    offload_optimizer: bool = False
    rendezvous: bool = False
    stragglers: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        for stage, factor in self.stragglers:
            if not (0 <= stage < self.parallel.pp and factor > 0):
                raise ValueError(
                    f"stragglers has {stage}: {factor}; expected a stage below {self.parallel.pp} and a factor above 0"
                )
        if not 0 < self.efficiency <= 1:
            raise ValueError(f"efficiency is {self.efficiency}; expected more than 0 and at most 1")
        if not 0 <= self.overlap_grad_reduce <= 1:
            raise ValueError(f"overlap_grad_reduce is {self.overlap_grad_reduce}; expected 0 to 1")
        for name in ("memory_reserve_bytes", "optimizer_passes_bytes"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected bytes, not negative")
        for name in ("cp", "ep"):
            if getattr(self.parallel, name) > 1:
                raise ValueError(
                    f"{name} is {getattr(self.parallel, name)}; expected 1: only pipefill configure has it"
                )
        self.parallel.check(self.model)
        for stage in range(self.parallel.pp):
            self._check_memory(stage)

    def _check_memory(self, stage: int) -> None:
        memory = self.memory(stage)
        needed, there = memory.total_bytes + self.memory_reserve_bytes, self.gpu.memory_bytes
        if self.offload_optimizer:  # its state and activations are never on the GPU together
            needed -= min(memory.optimizer_bytes, memory.activations_bytes)
        if needed > there:
            parts = {
                "weights": memory.weights_bytes,
                "gradients": memory.gradients_bytes,
                "optimizer": memory.optimizer_bytes,
                "activations": memory.activations_bytes,
                "reserve": self.memory_reserve_bytes,
            }
            sizes = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())
            raise ValueError(
                f"stage {stage} needs {needed / GIB:.2f} GiB ({sizes}); expected at most the {there / GIB:.2f} GiB of "
                f"{self.gpu.name}"
            )

    @property
    def microbatches(self) -> int:
        return self.parallel.microbatches

    @property
    def schedule(self) -> Schedule:
        its = self.parallel
        return _schedule(its.schedule, its.pp, its.microbatches, its.chunks, its.group_size)

    def memory(self, stage: int) -> StageMemory:
        """Peak memory of one GPU of a stage."""
        kept = activation_bytes(self.model, self.parallel)
        return stage_memory(self.model, self.parallel, stage, _peaks(self.schedule, kept)[stage])

    def free_bytes(self, stage: int) -> int:
        """Memory that is free in a bubble: the GPU's, minus the main job's peak and the reserve.

        The peak counts, and not the memory that is live in the bubble, since the main job's allocator keeps it.
        """
        memory = self.memory(stage)
        free = self.gpu.memory_bytes - self.memory_reserve_bytes - memory.total_bytes
        return free + (memory.optimizer_bytes if self.offload_optimizer else 0)

    def costs(self) -> PipelineCosts:
        costs = CostModel(
            self.model,
            self.gpu,
            self.network,
            self.parallel,
            self.efficiency,
            self.overlap_grad_reduce,
            self.optimizer_passes_bytes,
        ).pipeline()
        for stage, factor in self.stragglers:
            costs = costs.slowed(stage, factor, self.parallel.held(stage))
        return costs

    def timeline(self) -> Timeline:
        return _timeline(self.schedule, self.costs(), self.rendezvous)

    @property
    def iteration_s(self) -> float:
        return self.timeline().period_ns / 1e9

    @property
    def bubble_share(self) -> float:
        """Bubbles' share of all devices' time."""
        return bubble_share(self.timeline())

    def groups(self) -> tuple[DeviceGroup, ...]:
        """The devices, ``tp * dp`` of each stage, with their bubble cycles."""
        timeline, count = self.timeline(), self.parallel.tp * self.parallel.dp
        return tuple(
            DeviceGroup(f"stage {stage}", count, bubble_cycle(timeline, stage, self.free_bytes(stage)))
            for stage in range(self.parallel.pp)
        )


_schedule = lru_cache(maxsize=64)(order_of)


@lru_cache(maxsize=64)
def _timeline(schedule: Schedule, costs: PipelineCosts, rendezvous: bool) -> Timeline:
    return simulate(schedule, costs, rendezvous)


@lru_cache(maxsize=64)
def _peaks(schedule: Schedule, kept: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(peak_activation_bytes(schedule, kept))

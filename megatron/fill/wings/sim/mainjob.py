"""Analytic main job: the costs of its passes, its memory, its timeline, and the resulting bubbles of its devices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megatron.fill.pipeline.bubbles import bubble_cycle, bubble_share, peak_activation_bytes
from megatron.fill.pipeline.costs import PipelineCosts, StageCost
from megatron.fill.pipeline.schedule import Schedule
from megatron.fill.pipeline.timeline import Timeline, simulate
from megatron.fill.wings.mainjob.analytic import (
    ALL_REDUCES,
    added,
    boundary_bytes,
    p2p_bytes,
    stage_cost,
    tied_embedding_bytes,
)
from megatron.fill.wings.mainjob.hardware import GIB, GpuKind, Network
from megatron.fill.wings.mainjob.memory import StageMemory, activation_bytes, stage_memory, stage_parameters
from megatron.fill.wings.mainjob.model import ModelSpec
from megatron.fill.wings.mainjob.order import order_of
from megatron.fill.wings.mainjob.parallel import Parallel
from megatron.fill.wings.sim.values import DeviceGroup


@dataclass(frozen=True, slots=True)
class MainJob:
    """A pipeline-parallel training on a cluster.

    Ranks are laid out as in Megatron: tensor-parallel ranks next to each other, then data-parallel ones, then stages.
    """

    name: str
    model: ModelSpec
    gpu: GpuKind
    network: Network
    parallel: Parallel
    # Achieved fraction of ``GpuKind.peak_flops`` in a pass's computation, in any precision; communication is added.
    efficiency: float = 0.45
    # Memory per GPU outside the accounting: CUDA context, NCCL's buffers, workspaces, and the allocator's waste. The
    # default is an assumption.
    memory_reserve_bytes: int = 2 * GIB
    overlap_grad_reduce: float = 0.0  # share of the gradients' reduction that overlaps with passes
    # Memory traffic of the optimizer per parameter: the gradient norm reads gradients (4), Adam reads gradients,
    # weights and two moments (16) and writes the moments and the weights in both precisions (14), and gradients are set
    # to zero (4).
    optimizer_passes_bytes: float = 38.0
    # True if the optimizer's state is in host memory except during its step (PipeFill, section 4.1), so that bubbles
    # can use its memory. The copies are assumed to take no time.
    offload_optimizer: bool = False
    stragglers: tuple[tuple[int, float], ...] = ()  # factors of the stages whose passes take longer

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
        """Return the costs of one iteration."""
        its = self.parallel
        counts = zip(its.layers(self.model), its.dense_layers(self.model), strict=True)
        last = its.pp * its.chunks - 1
        costs = PipelineCosts(
            tuple(
                self._stage(every, at == last, dense, its.later(self.model, at))
                for at, (every, dense) in enumerate(counts)
            ),
            _ns(self._p2p_s()),
            tuple(_ns(self._reduce_s(rank)) for rank in range(its.pp)),
            tuple(_ns(self._optimizer_s(rank)) for rank in range(its.pp)),
        )
        for stage, factor in self.stragglers:
            costs = costs.slowed(stage, factor, its.held(stage))
        return costs

    def _stage(self, layers: int, is_last: bool, dense: int, later: int) -> StageCost:
        """Return the costs of one microbatch on a virtual stage with so many layers, ``dense`` of them without experts.

        Tensor-parallel ranks reduce, or with sequence parallelism scatter and gather, which takes as long.  A group
        larger than a node has the nodes to itself: one link of its ring leaves each node.
        """
        tp, size = self.parallel.tp, boundary_bytes(self.model, self.parallel)
        reduce_s = self.network.all_reduce_s(size, tp, tp > self.network.gpus_per_node, 1)
        both_s = (ALL_REDUCES * reduce_s,) * 2
        its = self.gpu, self.parallel, self.efficiency
        own = stage_cost(self.model, *its, layers - dense, is_last, *both_s, dense, later)
        return added(own, stage_cost(self.model.bare, *its, dense, False, *both_s)) if dense else own

    def _p2p_s(self) -> float:
        """Return the seconds of a transfer between neighbouring stages, while all ranks of a stage send at once."""
        if self.parallel.pp == 1:
            return 0.0
        size = p2p_bytes(self.model, self.parallel)
        return size / self.network.bandwidth(*self._between_stages()) + self.network.latency_s

    def _between_stages(self) -> tuple[bool, int]:
        """Return True if the training spans nodes, and the number of a node's ranks that send to the next stage."""
        its, node = self.parallel, self.network.gpus_per_node
        return its.gpus > node, min(its.tp * its.dp, node)

    def _data_parallel(self) -> tuple[bool, int]:
        """Return True if data-parallel groups span several nodes, and the number of rings that then leave a node."""
        its, node = self.parallel, self.network.gpus_per_node
        return its.tp * its.dp > node, min(its.tp, node)

    def _reduce_s(self, rank: int) -> float:
        """Return the seconds to reduce gradients over data-parallel ranks, and a tied embedding's over its two stages.

        With the distributed optimizer the former is a reduce-scatter: half of an all-reduce.
        """
        its, model = self.parallel, self.model
        size = stage_parameters(model, its, rank) * its.precision.gradient_bytes
        reduce_s = self.network.all_reduce_s(size, its.dp, *self._data_parallel())
        if its.distributed_optimizer:
            reduce_s /= 2
        reduce_s *= 1 - self.overlap_grad_reduce
        if rank in (its.placement[0], its.placement[-1]):
            size = tied_embedding_bytes(model, its)
            reduce_s += self.network.all_reduce_s(size, 2, *self._between_stages()) if size else 0.0
        return reduce_s

    def _optimizer_s(self, rank: int) -> float:
        """Return the seconds of an optimizer step, from its memory traffic, and of gathering weights if distributed."""
        its = self.parallel
        parameters = stage_parameters(self.model, its, rank)
        step_s = parameters * self.optimizer_passes_bytes / self.gpu.memory_bandwidth
        if not its.distributed_optimizer:
            return step_s
        weights = parameters * its.precision.weight_bytes
        return step_s / its.dp + self.network.all_reduce_s(weights, its.dp, *self._data_parallel()) / 2

    def timeline(self) -> Timeline:
        return _timeline(self.schedule, self.costs())

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


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


_schedule = lru_cache(maxsize=64)(order_of)
_timeline = lru_cache(maxsize=64)(simulate)
_peaks = lru_cache(maxsize=64)(peak_activation_bytes)

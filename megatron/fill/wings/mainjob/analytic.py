"""Analytical times of the parts of a training's iteration.

A pass takes the time of its floating-point operations at a share of the GPU's peak (``efficiency``), plus that of the
all-reduces of tensor parallelism; nothing is fitted to measurements.  The embedding's look-up, losses and layer norms
are neglected; ``roofline`` counts them, operation by operation.

Ranks are laid out as in Megatron: tensor-parallel ranks next to each other, then data-parallel ones, then stages.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.fill.pipeline.costs import PipelineCosts, StageCost
from megatron.fill.wings.mainjob.hardware import GpuKind, Network
from megatron.fill.wings.mainjob.memory import stage_parameters
from megatron.fill.wings.mainjob.model import ModelSpec
from megatron.fill.wings.mainjob.parallel import Parallel, Recompute

ALL_REDUCES = 2  # tensor-parallel all-reduces per layer and pass: after the attention and after the MLP


@dataclass(frozen=True, slots=True)
class CostModel:
    """The times of a training's parts, from its shape; ``MainJob`` explains the fields."""

    model: ModelSpec
    gpu: GpuKind
    network: Network
    parallel: Parallel
    efficiency: float
    overlap_grad_reduce: float
    optimizer_passes_bytes: float

    def pipeline(self) -> PipelineCosts:
        """Return the costs of one iteration."""
        its = self.parallel
        counts = zip(its.layers(self.model), its.dense_layers(self.model), strict=True)
        last = its.pp * its.chunks - 1
        return PipelineCosts(
            tuple(self.stage(every, at == last, dense) for at, (every, dense) in enumerate(counts)),
            _ns(self.p2p_s()),
            tuple(_ns(self.reduce_s(rank)) for rank in range(its.pp)),
            tuple(_ns(self.optimizer_s(rank)) for rank in range(its.pp)),
        )

    def stage(self, layers: int, is_last: bool, dense: int = 0) -> StageCost:
        """Return the costs of one microbatch on a virtual stage with this number of layers.

        Args:
            dense: number of them without experts, where others have some.
        """
        both_s = (ALL_REDUCES * self._tensor_all_reduce_s(),) * 2
        its = self.gpu, self.parallel, self.efficiency
        own = stage_cost(self.model, *its, layers - dense, is_last, *both_s, dense)
        return added(own, stage_cost(self.model.bare, *its, dense, False, *both_s)) if dense else own

    def _tensor_all_reduce_s(self) -> float:
        """Return the seconds of one all-reduce, or of the reduce-scatter and all-gather of sequence parallelism.

        A group larger than a node has the nodes to itself: one link of its ring leaves each node.
        """
        tp = self.parallel.tp
        return self.network.all_reduce_s(
            boundary_bytes(self.model, self.parallel), tp, tp > self.network.gpus_per_node, 1
        )

    def p2p_s(self) -> float:
        """Return the seconds of a transfer between neighbouring stages, while all ranks of a stage send at once."""
        if self.parallel.pp == 1:
            return 0.0
        return (
            p2p_bytes(self.model, self.parallel) / self.network.bandwidth(*self._between_stages())
            + self.network.latency_s
        )

    def _between_stages(self) -> tuple[bool, int]:
        """Return True if the training spans nodes, and the number of a node's ranks that send to the next stage."""
        its, node = self.parallel, self.network.gpus_per_node
        return its.gpus > node, min(its.tp * its.replicas, node)

    def _data_parallel(self) -> tuple[bool, int]:
        """Return True if data-parallel groups span several nodes, and the number of rings that then leave a node."""
        its, node = self.parallel, self.network.gpus_per_node
        return its.tp * its.replicas > node, min(its.tp, node)

    def reduce_s(self, rank: int) -> float:
        """Return the seconds to reduce gradients over data-parallel ranks, and a tied embedding's over its two stages.

        With the distributed optimizer the former is a reduce-scatter: half of an all-reduce.
        """
        its, model = self.parallel, self.model
        size = stage_parameters(model, its, rank) * its.precision.gradient_bytes
        reduce_s = self.network.all_reduce_s(size, its.replicas, *self._data_parallel())
        if its.distributed_optimizer:
            reduce_s /= 2
        reduce_s *= 1 - self.overlap_grad_reduce
        if rank in (its.placement[0], its.placement[-1]):
            size = tied_embedding_bytes(model, its)
            reduce_s += self.network.all_reduce_s(size, 2, *self._between_stages()) if size else 0.0
        return reduce_s

    def optimizer_s(self, rank: int) -> float:
        """Return the seconds of an optimizer step, from its memory traffic, and of gathering weights if distributed."""
        its = self.parallel
        parameters = stage_parameters(self.model, its, rank)
        step_s = parameters * self.optimizer_passes_bytes / self.gpu.memory_bandwidth
        if not its.distributed_optimizer:
            return step_s
        weights = parameters * its.precision.weight_bytes
        gather_s = self.network.all_reduce_s(weights, its.replicas, *self._data_parallel()) / 2
        return step_s / its.replicas + gather_s


def stage_cost(
    model: ModelSpec,
    gpu: GpuKind,
    parallel: Parallel,
    efficiency: float,
    layers: int,
    is_last: bool,
    forward_exchange_s: float,
    backward_exchange_s: float,
    before: int = 0,
) -> StageCost:
    """Return the times of one microbatch's passes on a virtual stage.

    A backward pass has twice the operations of the forward pass; half of those with weights are for the weights'
    gradients, and none of the attention's core (Qi et al. 2023, arXiv 2401.10241, Table 1).

    Args:
        is_last: True if the stage has the output layer.
        forward_exchange_s: seconds of communication within a stage in the forward pass of one layer.
        backward_exchange_s: likewise in the backward pass, without recomputation.
        before: number of layers of another kind that the stage has before these, and that are recomputed first.
    """
    rate = parallel.tp * parallel.cp * gpu.peak_flops * efficiency
    later = model.predicted if is_last else 0
    again_layers = layers_again(parallel, before, layers, later)
    layers += later
    matrices = layers * model.matrix_flops(parallel.microbatch) / rate
    core = layers * model.attention_flops(parallel.microbatch) / rate
    output = (1 + later) * model.output_flops(parallel.microbatch) / rate if is_last else 0.0
    output += later * 2 * parallel.microbatch * model.sequence * model.joined_parameters / rate
    exchange = layers * forward_exchange_s
    again = 0.0
    if parallel.recompute is Recompute.SELECTIVE:
        again = layers * again_flops(model, parallel) / rate
        if parallel.computes_again("moe" if model.experts else "mlp"):
            again += exchange / 2  # that of the attention is not exchanged again
    elif parallel.recompute is Recompute.FULL:
        again = again_layers / max(1, layers) * (matrices + core + exchange)
    forward = matrices + core + output + exchange
    backward = 2 * (matrices + core + output) + layers * backward_exchange_s + again
    return cost_of(forward, backward, matrices + output)


def layers_again(parallel: Parallel, before: int, layers: int, later: int) -> int:
    """Return how many layers of a virtual stage, those that predict later tokens too, are computed again in full.

    By blocks, none of the latter is (Megatron-core 0.19, ``transformer/multi_token_prediction.py``).

    Args:
        before: number of the stage's layers that come before these.
    """
    own = parallel.again(before + layers) - parallel.again(before)
    return own + (parallel.again(later) if parallel.recomputed is None else 0)


def again_flops(model: ModelSpec, parallel: Parallel) -> float:
    """Return the FLOPs of one layer's forward pass that selective recomputation does again."""
    whole = model.experts_per_token * model.mlp_parameters + model.shared_parameters
    shared = parallel.computes_again("shared_experts") * model.shared_parameters
    parameters = whole if parallel.computes_again("moe" if model.experts else "mlp") else shared
    core = model.attention_flops(parallel.microbatch) if parallel.computes_again("core_attn") else 0
    return core + 2 * parallel.microbatch * model.sequence * parameters


def boundary_bytes(model: ModelSpec, parallel: Parallel) -> float:
    """Return the bytes of one microbatch's activations between two layers, over all tensor-parallel ranks."""
    tokens = parallel.microbatch * model.sequence / parallel.cp
    return tokens * model.hidden * parallel.precision.weight_bytes


def p2p_bytes(model: ModelSpec, parallel: Parallel) -> float:
    """Return the bytes that one rank sends to the next stage: its part with sequence parallelism, else all of them."""
    return boundary_bytes(model, parallel) / (parallel.tp if parallel.sequence_parallel else 1)


def tied_embedding_bytes(model: ModelSpec, parallel: Parallel) -> float:
    """Return the bytes of a tied embedding's gradients, reduced between two ranks; 0 if one has both its stages."""
    if not model.tied_embeddings or parallel.placement[0] == parallel.placement[-1]:
        return 0.0
    return model.embedding_parameters / parallel.tp * parallel.precision.gradient_bytes


def cost_of(forward_s: float, backward_s: float, weights_s: float) -> StageCost:
    """Return the times in ns of passes that take so many seconds; those of the weights are a part of the backward."""
    return StageCost(_ns(forward_s), _ns(backward_s), _ns(weights_s))


def added(one: StageCost, other: StageCost) -> StageCost:
    """Return the times of both, one after the other."""
    return StageCost(
        one.forward_ns + other.forward_ns, one.backward_ns + other.backward_ns, one.weight_ns + other.weight_ns
    )


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)

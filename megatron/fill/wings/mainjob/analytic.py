"""Analytical times of a stage's passes, for the simulator, and the bytes that ranks exchange.

A pass takes the time of its floating-point operations at a share of the GPU's peak (``efficiency``), plus that of what
ranks exchange in it; nothing is fitted to measurements.  The embedding's look-up, losses and layer norms are neglected;
``roofline``, which ``pipefill configure`` uses, counts them, operation by operation.
"""

from __future__ import annotations

from megatron.fill.pipeline.costs import StageCost
from megatron.fill.wings.mainjob.hardware import GpuKind
from megatron.fill.wings.mainjob.model import ModelSpec
from megatron.fill.wings.mainjob.parallel import Parallel, Recompute

ALL_REDUCES = 2  # tensor-parallel all-reduces per layer and pass: after the attention and after the MLP


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
    later: int = 0,
) -> StageCost:
    """Return the times of one microbatch's passes on a virtual stage.

    A backward pass has twice the operations of the forward pass; half of those with weights are for the weights'
    gradients, and none of the attention's core (Qi et al. 2023, arXiv 2401.10241, Table 1).

    Args:
        is_last: True if the stage has the output layer.
        forward_exchange_s: seconds of communication within a stage in the forward pass of one layer.
        backward_exchange_s: likewise in the backward pass, without recomputation.
        before: number of layers of another kind that the stage has before these, and that are recomputed first.
        later: number of layers beside these that predict later tokens.
    """
    rate = parallel.tp * parallel.cp * gpu.peak_flops * efficiency
    again_layers = layers_again(parallel, before, layers, later)
    layers += later
    matrices = layers * model.matrix_flops(parallel.microbatch) / rate
    core = layers * model.attention_flops(parallel.microbatch) / rate
    output = (1 + model.predicted) * model.output_flops(parallel.microbatch) / rate if is_last else 0.0
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

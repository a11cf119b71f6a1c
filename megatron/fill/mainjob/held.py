"""What one GPU of a stage holds, as Megatron allocates it: what a configuration is refused for.

``memory`` has the published formulas, which sum up what passes keep.  Here the passes' tapes are replayed: a GPU holds
most in a backward pass, when gradients are there beside what all passes in flight keep.  Compared with Megatron's own
iteration in docs/configure.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.fill.mainjob.memory import StageMemory, expert_parameters, stage_parameters
from megatron.fill.mainjob.model import ModelSpec
from megatron.fill.mainjob.parallel import Parallel
from megatron.fill.mainjob.tape import Sizes, kept_bytes, layer_tape, peak_bytes, sizes

_TOKEN_BYTES = 28  # tokens, labels, positions: 8 each; the loss mask: 4


@dataclass(frozen=True, slots=True)
class Pass:
    """Of one micro-batch on one virtual stage, in bytes.

    Attributes:
        kept_bytes: from its forward pass on.
        peak_bytes: the most in its backward pass, ``kept_bytes`` and gradients included.
    """

    kept_bytes: int
    peak_bytes: int


def passes(model: ModelSpec, its: Parallel) -> tuple[Pass, ...]:
    """Of each virtual stage, ``chunk * pp + rank``."""
    size = sizes(model, its)
    last = its.pp * its.chunks - 1
    layers = its.layers(model)
    known: dict[tuple[int, bool, bool, bool, bool], Pass] = {}
    found = []
    for at, count in enumerate(layers):
        key = count, at == 0, at == last, at % its.pp == 0, at % its.pp == its.pp - 1
        if key not in known:
            known[key] = _pass(model, its, size, count, at == 0, at == last)
        found.append(known[key])
    return tuple(found)


def _pass(model: ModelSpec, its: Parallel, size: Sizes, layers: int, first: bool, last: bool) -> Pass:
    mask = model.sequence**2 / its.cp
    layer = layer_tape(model, its, 0.0 if first or last else mask)
    each = kept_bytes(layer)
    before = most = 0.0
    if first or last:
        before = mask * its.microbatch + _TOKEN_BYTES * model.sequence * its.microbatch
    if first and model.vocabulary:
        before += size.mask
        most = before + size.residual + size.whole + _embedding_bytes(model, its)
    kept = before + layers * each
    if layers:
        most = max(most, kept - each + peak_bytes(layer))
    if last and model.vocabulary:
        kept, peak = _output(model, its, size, kept)
        most = max(most, peak)
    # A gradient that came from the next stage, and the one that the micro-batch before sent to the previous stage.
    passed = size.residual * ((not last) + (not first and its.microbatches > 1))
    return Pass(round(kept), round(most + passed))


def _output(model: ModelSpec, its: Parallel, size: Sizes, kept: float) -> tuple[float, float]:
    """What is kept after the output layer and the loss, and the most in their backward pass.

    Logits are kept in single precision for the loss, and their gradient is made in the same place.
    """
    number = its.precision.weight_bytes
    logits = model.sequence / its.cp * its.microbatch * model.vocabulary / its.tp
    normed = kept + 2 * size.residual
    copied = number * logits if number < 4 else 0.0
    product = normed + max(copied, 4 * logits if number == 4 else 0.0) + size.whole + _embedding_bytes(model, its, False)
    return normed + 4 * logits, max(normed + 4 * logits + copied, product)


def _embedding_bytes(model: ModelSpec, its: Parallel, positions: bool = True) -> float:
    """A gradient of the embedding's weights, in the weights' precision."""
    numbers = model.embedding_parameters / its.tp + (model.positions * model.hidden if positions else 0)
    return numbers * its.precision.weight_bytes


def buffer_bytes(model: ModelSpec, its: Parallel) -> int:
    """Megatron's global buffer: scores are multiplied into it, and sequences gathered."""
    size = sizes(model, its)
    gathered = 0.0
    if its.tp > 1 and its.sequence_parallel:
        gathered = size.whole
    if model.experts and (its.tp > 1 or its.ep > 1):
        gathered = size.whole * its.ep
    return round(max(size.scores, gathered))


def held_memory(model: ModelSpec, its: Parallel, rank: int, peak: int) -> StageMemory:
    """What one GPU of a stage holds.

    Args:
        peak: the most that the schedule's passes hold there, as ``pipeline.peak_pass_bytes`` says.
    """
    parameters = stage_parameters(model, its, rank)
    experts = expert_parameters(model, its, rank)
    divisor = its.replicas if its.distributed_optimizer else 1
    expert_divisor = its.replicas // its.ep if its.distributed_optimizer else 1
    divided = (parameters - experts) / divisor + experts / expert_divisor
    precision = its.precision
    # In half precision the optimizer's gradients in single precision are there during its step only.
    return StageMemory(
        weights_bytes=round(parameters * precision.weight_bytes),
        gradients_bytes=round(parameters * precision.gradient_bytes),
        optimizer_bytes=round(divided * min(12, precision.optimizer_bytes)),
        activations_bytes=peak + buffer_bytes(model, its),
    )

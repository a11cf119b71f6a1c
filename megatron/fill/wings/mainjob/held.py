"""Peak memory of one GPU of a stage, as Megatron allocates it; a configuration above the GPU's memory is refused.

``memory`` has the published formulas, which sum the activations that passes keep.  Here the passes' tapes are replayed:
memory peaks in a backward pass, when gradients come on top of the activations of all passes in flight.
docs/configure.md compares it with Megatron's own iterations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron.fill.wings.mainjob.memory import StageMemory, embeddings, optimizer_parameters, stage_parameters
from megatron.fill.wings.mainjob.model import ModelSpec
from megatron.fill.wings.mainjob.parallel import Parallel, Recompute
from megatron.fill.wings.mainjob.tape import Sizes, kept_bytes, layer_tape, peak_bytes, sizes

_KINDS = Recompute.FULL, Recompute.NONE
_TOKEN_BYTES = 28  # bytes per token: 8 each for token, label and position, and 4 for the loss mask


@dataclass(frozen=True, slots=True)
class Pass:
    """Memory of one microbatch on one virtual stage, in bytes.

    Attributes:
        kept_bytes: activations kept from its forward pass to its backward pass.
        peak_bytes: peak in its backward pass, including ``kept_bytes`` and gradients.
    """

    kept_bytes: float
    peak_bytes: float


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Memory of the parts of a pass of one microbatch on one GPU, in bytes; ``passes`` adds them up for each stage.

    Attributes:
        inner: a layer that creates its causal mask itself.
        outer: a layer of the first or the last virtual stage, which receive a mask with the tokens.
        inner_bare: likewise one of the first layers, which have no experts where others have some; ``outer_bare``.
        later: a layer that predicts a later token, with what joins the token's embedding to the stream;
            ``predicted`` is the number of them.
        tied: gradient of the output layer's weights, which waits for the embedding's if both are on one stage.
        tokens: tokens with their masks.
        embedding: kept by the embedding; ``embedding_work``: additional memory in its backward pass.
        output: kept by the output layer and a loss; ``output_peak``: peak in their backward pass.
        passed: activations passed from stage to stage.
        buffer: Megatron's global buffer, shared by all microbatches.
        plain: the parts without recomputation, where it is of a virtual stage's first layers alone; else None.
    """

    inner: Pass
    outer: Pass
    inner_bare: Pass
    outer_bare: Pass
    later: Pass
    predicted: int
    tied: float
    tokens: float
    embedding: float
    embedding_work: float
    output: float
    output_peak: float
    passed: float
    buffer: int
    plain: MicroBatch | None = None


def micro_batch(model: ModelSpec, its: Parallel) -> MicroBatch:
    """Return the parts' memory; it is cached for layouts with equal microbatches."""
    if its.recomputed is not None and its.recompute is Recompute.FULL:
        parts, plain = (micro_batch(model, replace(its, recomputed=None, recompute=kind)) for kind in _KINDS)
        return replace(parts, plain=plain)
    alone = Parallel(  # without what their memory does not depend on
        tp=its.tp,
        pp=1,
        cp=its.cp,
        ep=its.ep,
        expert_tp=its.expert_width,
        microbatch=its.microbatch,
        global_batch=its.microbatch,
        sequence_parallel=its.sequence_parallel,
        recompute=its.recompute,
        recompute_modules=its.recompute_modules,
        precision=its.precision,
    )
    return _micro_batch(model, alone)


@lru_cache(maxsize=4096)
def _micro_batch(model: ModelSpec, its: Parallel) -> MicroBatch:
    size = sizes(model, its)
    mask = model.sequence**2 / its.cp if model.kernels.masked else 0.0
    positions = model.positions * model.hidden * its.precision.weight_bytes
    work = size.residual + size.whole + _embedding_bytes(model, its) + positions
    output, output_peak = _output(model, its, size)
    there = bool(model.vocabulary)
    return MicroBatch(
        inner=_layer(model, its, mask),
        outer=_layer(model, its, 0.0),
        inner_bare=_layer(model.bare, its, mask),
        outer_bare=_layer(model.bare, its, 0.0),
        later=_later(model, its, size),
        predicted=model.predicted,
        tied=_output_gradient_bytes(model, its) if model.tied_embeddings else 0.0,
        tokens=its.microbatch * (mask + _TOKEN_BYTES * model.sequence),
        embedding=size.mask if there else 0.0,
        embedding_work=work if there else 0.0,
        output=output if there else 0.0,
        output_peak=output_peak if there else 0.0,
        passed=size.residual,
        buffer=_buffer_bytes(model, its, size),
    )


def _layer(model: ModelSpec, its: Parallel, mask_bytes: float) -> Pass:
    tape = layer_tape(model, its, mask_bytes)
    return Pass(kept_bytes(tape), peak_bytes(tape))


def _later(model: ModelSpec, its: Parallel, size: Sizes) -> Pass:
    """Return the memory of a layer that predicts a later token, without its loss.

    The token's embedding and the stream have a norm each, and both are joined by a product, which full recomputation
    does again too (Megatron-core 0.19, ``transformer/multi_token_prediction.py``).
    """
    layer = _layer(model, its, 0.0)
    joined = (2 + 2 * size.input) * size.residual
    kept = size.residual if its.recompute is Recompute.FULL else joined
    return Pass(size.mask + kept + layer.kept_bytes, size.mask + joined + layer.peak_bytes)


def passes(parts: MicroBatch, its: Parallel, layers: Sequence[int], rank: int, dense: Sequence[int] = ()) -> list[Pass]:
    """Return the memory of a pass on each virtual stage of a rank, in order.

    Args:
        layers: number of layers of all virtual stages, as from ``its.layers``.
        dense: number of them without experts, as from ``its.dense_layers``; none of them if empty.
    """
    dense = dense or [0] * len(layers)
    last = its.pp * its.chunks - 1
    several = its.microbatches > 1
    found: list[Pass] = []
    held = its.held(rank)
    for virtual in held:
        predicts = its.predicts(virtual)
        alike = found and (layers[virtual], dense[virtual]) == (layers[held[1]], dense[held[1]])
        if len(found) > 1 and virtual != last and not predicts and alike:
            found.append(found[1])
        else:
            counts = layers[virtual] - dense[virtual], dense[virtual]
            found.append(_pass(parts, counts, virtual == 0, virtual == last, predicts, several, its.recomputed))
    return found


def _pass(
    parts: MicroBatch,
    layers: tuple[int, int],
    first: bool,
    last: bool,
    predicts: bool,
    several: bool,
    again: int | None,
) -> Pass:
    """Return the memory of a pass on a virtual stage.

    Args:
        layers: number of its layers that are as the last one, and of those without experts, which come before them.
        predicts: True if it has the layers that predict later tokens, whose outputs pass on with its own.
        several: True for more than one microbatch.
        again: number of its first layers that are as ``parts`` has them, while others are as ``parts.plain`` has them,
            if there is that.
    """
    ends = first or last or predicts
    alike, bare = _of_layers(parts, ends)
    runs = [(layers[1], bare), (layers[0], alike)]
    if again is not None and parts.plain:
        kinds = zip(runs, _of_layers(parts.plain, ends)[::-1], strict=True)
        runs = []
        for (count, layer), plain in kinds:
            runs += [(min(count, again), layer), (count - min(count, again), plain)]
            again -= min(count, again)
    kept = (parts.tokens if ends else 0.0) + (parts.embedding if first else 0.0)
    waiting = parts.tied if first and last else 0.0
    peak = kept + parts.embedding_work + waiting if first else 0.0
    for count, layer in runs:
        kept += count * layer.kept_bytes
        if count:
            peak = max(peak, kept - layer.kept_bytes + layer.peak_bytes + waiting)
    if predicts:
        later = (parts.plain or parts).later  # by blocks, none of them is computed again
        for _ in range(parts.predicted):
            peak = max(peak, kept + max(later.peak_bytes, parts.embedding_work) + parts.tied * last)
            kept += later.kept_bytes
    received, sent = (1 + parts.predicted * its for its in (predicts, last and not predicts))
    if last:
        # The previous microbatch is released only after the loss.
        before = parts.passed * sent if several and not first else 0.0
        kept += parts.predicted * parts.output  # the losses come after all layers, that of the next token last
        peak = max(peak, kept + parts.output_peak + before)
        kept += parts.output
    # The gradient received from the next stage, and the one that the previous microbatch sent to the previous stage.
    return Pass(kept, peak + parts.passed * (received * (not last) + sent * (not first and several)))


def _of_layers(parts: MicroBatch, is_end: bool) -> tuple[Pass, Pass]:
    """Return a layer as the last one and one without experts; of the first or the last virtual stage, or of another."""
    return (parts.outer, parts.outer_bare) if is_end else (parts.inner, parts.inner_bare)


def _output(model: ModelSpec, its: Parallel, size: Sizes) -> tuple[float, float]:
    """Return the bytes kept by the last layer norm, the output layer and the loss, and the peak in their backward pass.

    Logits are kept in single precision for the loss, and their gradient replaces them in place; Transformer Engine's
    loss leaves them in the precision that they have.  BERT's head keeps the inputs of its dense layer, its GELU and its
    norm in addition to the output layer's (Megatron-core 0.19, ``models/bert/bert_lm_head.py``).
    """
    number = its.precision.weight_bytes
    logits = model.sequence / its.cp * its.microbatch * model.vocabulary / its.tp
    inputs = (5 if model.word_head else 2) * size.residual
    product = size.whole + _output_gradient_bytes(model, its)
    if model.kernels.engine_loss:
        kept = inputs + number * logits
        return kept, kept + product
    copied = number * logits if number < 4 else 0.0
    product += copied or 4 * logits
    kept = inputs + 4 * logits
    replaced = 4 * logits if model.kernels.fused_loss else 0.0  # the loss's gradient, beside the logits
    return kept, max(kept + copied + replaced, inputs + product)


def _embedding_bytes(model: ModelSpec, its: Parallel) -> float:
    """Return the bytes of a gradient of the embedding's weights, in the weights' precision."""
    return model.embedding_parameters / its.tp * its.precision.weight_bytes


def _output_gradient_bytes(model: ModelSpec, its: Parallel) -> float:
    """Return the bytes of a gradient of the output layer's weights, which is not made if products add it up."""
    return 0.0 if model.kernels.accumulated else _embedding_bytes(model, its)


def _buffer_bytes(model: ModelSpec, its: Parallel, size: Sizes) -> int:
    """Return the bytes of Megatron's global buffer, for local layers' attention scores and gathered sequences."""
    gathered = size.whole if its.tp > 1 and its.sequence_parallel else 0.0
    if model.experts and (its.tp > 1 or its.ep > 1):
        gathered = size.whole * its.ep
    return round(max(0.0 if model.kernels.transformer_engine else size.scores, gathered))


def held_memory(model: ModelSpec, its: Parallel, parts: MicroBatch, rank: int, peak: float) -> StageMemory:
    """Return the memory of one GPU of a stage.

    Args:
        peak: peak bytes of the schedule's passes there, as from ``pipeline.bubbles.peak_pass_bytes``.
    """
    parameters = stage_parameters(model, its, rank)
    divided = optimizer_parameters(model, its, rank)
    precision = its.precision
    copied = 0.0  # weights that are there as 8-bit numbers too
    if model.kernels.fp8 and not model.kernels.fp8_weights:
        copied = parameters
    elif model.kernels.fp8_output and its.placement[-1] == rank:  # the output layer's are never 8-bit ones themselves
        copied = model.embedding_parameters / its.tp
    copies = model.kernels.fp8_copies * copied
    weights = parameters * precision.weight_bytes
    if model.kernels.fp8_weights:  # which those of embeddings are not
        whole = embeddings(model, its, rank) * model.embedding_parameters / its.tp
        whole += model.positions * model.hidden * (0 in its.held(rank))
        weights = whole * precision.weight_bytes + (parameters - whole) * model.kernels.fp8_copies
    # With half-precision gradients, their single-precision copies exist in the optimizer's step only, when there are no
    # activations.
    kept = min(12, its.state_bytes)
    step = divided * (its.state_bytes - kept)
    peak += _deferred_bytes(model, its, rank) + _stand_in_bytes(model, its, rank)
    return StageMemory(
        weights_bytes=round(weights),
        gradients_bytes=round(parameters * precision.gradient_bytes),
        optimizer_bytes=round(divided * kept),
        activations_bytes=round(max(peak + copies, step)) + parts.buffer,
    )


def _deferred_bytes(model: ModelSpec, its: Parallel, rank: int) -> float:
    """Return the bytes that microbatches keep for a deferred gradient of the output layer's weights.

    Each keeps the output layer's input and the gradient of its logits, until the last stage would have to wait.
    """
    most = model.kernels.deferred
    if rank != its.placement[-1] or most == 0 or its.pp == 1:
        return 0.0
    count = its.microbatches if most is None else min(most, its.microbatches)
    rows = model.sequence / its.cp * its.microbatch
    return count * rows * (model.hidden + model.vocabulary / its.tp) * its.precision.weight_bytes


def _stand_in_bytes(model: ModelSpec, its: Parallel, rank: int) -> float:
    """Return the bytes of what stands for gradients that products add up: a tensor for each shape of weights, for good.

    Experts have one shape; layers without experts may have another.
    """
    if not model.kernels.accumulated:
        return 0.0
    held = set(its.held(rank))
    last = its.pp * its.chunks - 1 in held
    dense = sum(count for virtual, count in enumerate(its.dense_layers(model)) if virtual in held)
    whole = model.attention_parameters + model.shared_parameters
    whole += model.bare.mlp_parameters if dense or not model.experts else 0
    whole += model.embedding_parameters if last else 0
    whole += model.joined_parameters if any(its.later(model, virtual) for virtual in held) else 0
    experts = model.mlp_parameters / its.expert_width if model.experts else 0.0
    return (whole / its.tp + experts) * its.precision.weight_bytes

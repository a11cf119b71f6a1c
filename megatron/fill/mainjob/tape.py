"""What passes through a stage keep, in the order in which they keep it, and what their backward needs beside it.

A forward pass puts what each of its operations keeps for the backward pass on a tape; the backward pass takes it off
again, last first.  So memory is highest somewhere near the beginning of a backward pass: what the tape holds up to an
operation, and the gradients that are there at that moment.  ``layer_tape`` lists these for Megatron's local layers
(without Transformer Engine); scripts/benchmarks/memory_truth.py finds the same by running them.

What is kept adds up to Korthikanti et al. 2022 (arXiv 2205.05198), Table 2; grouped-query attention's keys and values
are repeated for each head, and each operation's gradients are this module's own account.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.fill.mainjob.model import ModelSpec
from megatron.fill.mainjob.parallel import Parallel, Recompute


@dataclass(frozen=True, slots=True)
class Step:
    """One operation.

    Attributes:
        kept_bytes: what it leaves on the tape.
        working_bytes: in its backward pass, beside the tape up to here: gradients, and what it computes with.
    """

    name: str
    kept_bytes: float
    working_bytes: float


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one micro-batch's activations on one GPU, in bytes.

    Attributes:
        whole: ``s b h`` numbers, as matrix products take them.
        residual: the same, as layers pass it on: with sequence parallelism a part.
        mask: of a dropout of the residual.
        query: also what goes into the projection.
        keys: keys and values, as they are projected.
        scores: of all heads; ``score_mask`` is of their dropout.
        ffn: inside the MLP, after its activation function; ``gated`` before it.
    """

    whole: float
    residual: float
    mask: float
    query: float
    keys: float
    scores: float
    score_mask: float
    ffn: float
    gated: float


def sizes(model: ModelSpec, its: Parallel) -> Sizes:
    """Of a micro-batch."""
    number = its.precision.weight_bytes
    rows = model.sequence / its.cp * its.microbatch
    whole = rows * model.hidden * number
    divisor = its.tp if its.sequence_parallel else 1
    scores = rows * model.heads / its.tp * model.sequence * number
    ffn = rows * model.ffn / its.tp * number
    return Sizes(
        whole=whole,
        residual=whole / divisor,
        mask=whole / divisor / number if model.hidden_dropout else 0.0,
        query=whole / its.tp,
        keys=2 * whole / its.tp * model.groups / model.heads,
        scores=scores,
        score_mask=scores / number if model.attention_dropout else 0.0,
        ffn=ffn,
        gated=ffn * (2 if model.swiglu else 1),
    )


def layer_tape(model: ModelSpec, its: Parallel, mask_bytes: float = 0.0) -> list[Step]:
    """One layer's operations, in the order of the forward pass.

    Args:
        mask_bytes: of a causal mask that the layer makes for itself; 0 on stages that get one with the tokens.
    """
    size = sizes(model, its)
    if its.recompute is not Recompute.FULL:
        return _tape(model, its, size, mask_bytes)
    inner = _tape(model, replace(its, recompute=Recompute.NONE), size, mask_bytes)
    return [Step("layer", size.residual, peak_bytes(inner) - size.residual + _again(size.residual))]


def _tape(model: ModelSpec, its: Parallel, size: Sizes, mask_bytes: float) -> list[Step]:
    width = its.precision.weight_bytes * model.hidden / its.tp
    rows = model.hidden * (1 + 2 * model.groups / model.heads)  # of the projection to query, keys and values
    gradient = size.residual  # of the residual stream: there all the time
    grouped, rotated = model.groups < model.heads, not model.positions
    projected = size.query + size.keys
    repeated = 2 * size.query if grouped else 0.0
    # Views of what was projected, unless positions are rotated in or heads repeat the keys of their group.
    given = projected + (size.query if rotated or grouped else 0.0) + (size.keys / 2 if rotated else 0.0)
    plain = size.query if grouped else given
    core = [Step("split", plain, 2 * projected + repeated), *_core(model, size, repeated, mask_bytes)]
    if its.recompute is Recompute.SELECTIVE:
        core[0] = Step("split", 0.0, core[0].working_bytes)
        core = [Step("core", given, peak_bytes(core) + _again(size.query))]
    return [
        Step("norm", size.residual, gradient + 2 * size.residual),
        Step("qkv", size.residual, gradient + projected + size.whole + width * rows),
        *(Step(one.name, one.kept_bytes, gradient + one.working_bytes) for one in core),
        Step("projection", size.query, gradient + size.whole + size.query + width * model.hidden),
        Step("dropout", size.mask, 2 * gradient),
        *_mlp(model, its, size),
        Step("dropout", size.mask, 2 * gradient),
    ]


def _again(output_bytes: float) -> float:
    """Of what is computed again: its output and the gradient of it are there while its backward pass runs."""
    return 2 * output_bytes


def _core(model: ModelSpec, size: Sizes, repeated: float, mask_bytes: float) -> list[Step]:
    """The attention's core: from query, keys and values to their mixture.

    Scores are masked in place, in a view: for that, autograd copies their gradient twice.
    """
    per_head = repeated or size.keys
    values = per_head / 2
    return [
        Step("product", repeated, 2 * size.query + per_head + size.scores),
        Step("causal mask", mask_bytes, values + 4 * size.scores),
        Step("softmax", size.scores, values + 2 * size.scores),
        Step("dropout", size.score_mask, values + 2 * size.scores),
        Step("mixture", size.scores if model.attention_dropout else 0.0, 2 * size.query + size.scores),
    ]


def _mlp(model: ModelSpec, its: Parallel, size: Sizes) -> list[Step]:
    """One MLP; or the experts, one after the other, with as many tokens each."""
    weights = model.hidden * model.ffn / its.tp * its.precision.weight_bytes
    gates = 2 if model.swiglu else 1
    gradient = size.residual
    norm = Step("norm", size.residual, gradient + 2 * size.residual)
    if not model.experts:
        return [
            norm,
            Step("into", size.residual, gradient + size.gated + size.whole + gates * weights),
            Step("activation", size.gated, gradient + size.ffn + size.gated),
            Step("out of", size.ffn, gradient + size.whole + size.ffn + weights),
        ]
    passes = model.experts_per_token
    each = passes * its.ep / model.experts  # of a micro-batch, what one expert sees
    routed = passes * size.whole
    return [
        norm,
        Step("routing", size.residual + routed, gradient + routed + its.ep * size.whole),
        Step("into", 0.0, gradient + 2 * routed + each * size.gated + gates * weights),
        Step("activation", passes * size.gated, gradient + 2 * routed + each * (size.ffn + size.gated)),
        Step("out of", passes * size.ffn, gradient + 2 * routed + each * size.ffn + weights),
    ]


def kept_bytes(tape: Sequence[Step]) -> float:
    """What it holds after the forward pass."""
    return sum(step.kept_bytes for step in tape)


def peak_bytes(tape: Sequence[Step]) -> float:
    """The most that it holds in the backward pass, gradients included."""
    held = most = 0.0
    for step in tape:
        held += step.kept_bytes
        most = max(most, held + step.working_bytes)
    return most

"""The activation tape of a layer: the bytes that each operation keeps, and those that its backward pass adds.

In a forward pass each operation appends the activations that it keeps to a tape; the backward pass removes them again,
last first.  So memory peaks near the beginning of a backward pass: the tape up to an operation, and the gradients that
exist at that moment.  ``layer_tape`` lists both for Megatron's local layers (without Transformer Engine);
tests/support/memory_truth.py measures the same by running them.

The kept bytes add up to Korthikanti et al. 2022 (arXiv 2205.05198), Table 2; in addition, the keys and values of
grouped-query attention are repeated for each head, and the gradients of each operation are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.fill.wings.mainjob.model import ModelSpec
from megatron.fill.wings.mainjob.parallel import Parallel, Recompute


@dataclass(frozen=True, slots=True)
class Step:
    """An operation of a layer."""

    name: str
    kept_bytes: float  # bytes that it adds to the tape
    working_bytes: float  # bytes in its backward pass in addition to the tape up to here: gradients and temporaries


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of one microbatch's activations on one GPU, in bytes."""

    whole: float  # ``s b h`` numbers, the input of matrix products
    residual: float  # the same between layers; a part of it with sequence parallelism
    mask: float  # dropout mask of the residual stream
    query: float  # queries
    keys: float  # keys and values as projected
    repeated: float  # keys and values of all heads
    mixed: float  # the attention's output, the input of its projection
    # The latent of queries with multi-latent attention, of a part of the sequence with sequence parallelism; likewise
    # of keys and values, with the key's rotated channels.
    queries_latent: float
    keys_latent: float
    input: float  # share of their bytes that inputs of matrix products keep: a half as 8-bit numbers, else 1
    scores: float  # attention scores of all heads
    score_mask: float  # their dropout mask
    ffn: float  # activations inside the MLP after its activation function
    gated: float  # those before it
    factors: float  # both factors of a gate that is not fused


def sizes(model: ModelSpec, its: Parallel) -> Sizes:
    """Return the sizes of a microbatch's activations."""
    number = its.precision.weight_bytes
    rows = model.sequence / its.cp * its.microbatch
    whole = rows * model.hidden * number
    divisor = its.tp if its.sequence_parallel else 1
    latent = model.latent
    scores = rows * model.heads / its.tp * model.sequence * number
    ffn = rows * model.ffn / its.tp * number
    unfused = model.swiglu and not model.kernels.fused_gate
    return Sizes(
        whole=whole,
        residual=whole / divisor,
        mask=whole / divisor / number if model.hidden_dropout else 0.0,
        query=rows * model.query_width / its.tp * number,
        keys=rows * model.keys_width / its.tp * number,
        repeated=rows * model.heads * (model.head + model.value_head) / its.tp * number,
        mixed=rows * model.mixed_width / its.tp * number,
        queries_latent=rows / divisor * number * (latent.query if latent else 0),
        keys_latent=rows / divisor * number * (latent.keys + latent.rotated if latent else 0),
        input=0.5 if model.kernels.fp8 else 1.0,
        scores=scores,
        score_mask=scores / number if model.attention_dropout else 0.0,
        ffn=ffn,
        gated=ffn * (2 if model.swiglu else 1),
        factors=2 * ffn * unfused,
    )


def layer_tape(model: ModelSpec, its: Parallel, mask_bytes: float = 0.0) -> list[Step]:
    """Return a layer's operations, in the order of the forward pass.

    Args:
        mask_bytes: bytes of a causal mask that the layer creates itself; 0 on stages that receive one with the tokens.
    """
    size = sizes(model, its)
    if its.recompute is not Recompute.FULL:
        return _tape(model, its, size, mask_bytes)
    inner = _tape(model, replace(its, recompute=Recompute.NONE), size, mask_bytes)
    return [Step("layer", size.residual, peak_bytes(inner) - size.residual + _again(size.residual))]


def _tape(model: ModelSpec, its: Parallel, size: Sizes, mask_bytes: float) -> list[Step]:
    width = _gradient_bytes(model, its) * model.hidden / its.tp
    gradient = size.residual  # gradient of the residual stream, which exists all the time
    given, core = _core(model, its, size, mask_bytes)
    if its.computes_again("core_attn"):
        core[0] = Step("split", 0.0, core[0].working_bytes)
        core = [Step("core", given, peak_bytes(core) + _again(size.mixed))]
    if model.latent is None:
        rows = model.query_width + model.keys_width  # rows of the projection to query, keys and values
        work = size.query + size.keys + size.whole + width * rows
        projections = [Step("qkv", size.input * size.residual, work)]
    else:
        projections = _latent(model, its, size)
        if its.computes_again("mla_up_proj"):  # query, keys and values, once the core's backward pass needs them
            core[0] = Step(core[0].name, core[0].kept_bytes - given, core[0].working_bytes)
            core = [Step(one.name, one.kept_bytes, one.working_bytes + given) for one in core]
    if its.computes_again("layernorm") and (model.latent is not None or not model.kernels.transformer_engine):
        projections[0] = _without_norm(projections[0], size.input * size.residual)
    attention = [Step("norm", size.residual, 2 * size.residual), *projections, *core]
    return [
        *(Step(one.name, one.kept_bytes, gradient + one.working_bytes) for one in attention),
        Step("projection", size.mixed, gradient + size.whole + size.mixed + width * model.mixed_width),
        Step("dropout", size.mask, 2 * gradient),
        *_again_of_mlp(model, its, size),
        Step("dropout", size.mask, 2 * gradient),
    ]


def _gradient_bytes(model: ModelSpec, its: Parallel) -> int:
    """Return the bytes of a number of a weights' gradient that a backward pass makes before it is added up."""
    return 0 if model.kernels.accumulated else its.precision.weight_bytes


def _without_norm(step: Step, output_bytes: float) -> Step:
    """Return the operation after a norm whose output is computed again; Transformer Engine fuses other norms."""
    return Step(step.name, step.kept_bytes - output_bytes, step.working_bytes + output_bytes)


def _core(model: ModelSpec, its: Parallel, size: Sizes, mask_bytes: float) -> tuple[float, list[Step]]:
    """Return the bytes of query, keys and values that the attention's core is given, and its operations."""
    grouped, rotated = model.groups < model.heads, not model.positions
    projected = size.query + size.keys
    repeated = size.repeated if grouped else 0.0
    keys = size.keys * model.head / (model.head + model.value_head)
    if model.latent is not None:
        # Rotated and unrotated channels are joined, and values copied, so that nothing of the projections stays.
        given = plain = projected
    else:
        # Views of the projection's output, unless rotary positions are applied or heads repeat the keys of their group.
        given = projected + (size.query if rotated or grouped else 0.0) + (keys if rotated else 0.0)
        plain = size.query if grouped else given
    if model.kernels.flash:
        if model.latent is None:
            # The library's copies of query, key and value replace the projection; cuDNN takes them where they are.
            given = projected + (size.query + keys) * rotated
            plain = projected if _is_turned(model, its) else given
        return given, [Step("split", plain, 2 * projected), *_flash(model, its, size)]
    softmax = size.scores * (4 / its.precision.weight_bytes if model.kernels.wide_softmax else 1)
    unfused = _unfused(model, size, repeated, mask_bytes, softmax)
    return given, [Step("split", plain, 2 * projected + repeated), *unfused]


def _latent(model: ModelSpec, its: Parallel, size: Sizes) -> list[Step]:
    """Return the projections of multi-latent attention to the latents and from there to queries, keys and values.

    Both latents have a norm, which keeps its input, and the products after it keep its output (Megatron-core 0.19,
    ``transformer/multi_latent_attention.py``).
    """
    assert model.latent is not None
    latent = model.latent
    keys_only = size.keys_latent * latent.keys / (latent.keys + latent.rotated)
    latents = size.queries_latent + size.keys_latent
    made = _gradient_bytes(model, its)
    work = 2 * latents + size.residual + made * model.down_parameters
    down = Step("down", size.input * size.residual + latents, work)
    up = size.input * (size.queries_latent + keys_only)
    weights = made * max(latent.query or model.hidden, latent.keys) * model.query_width / its.tp
    return [down, Step("up", up, size.query + size.keys + latents + weights)]


def _again(output_bytes: float) -> float:
    """Return the bytes of a recomputed output and its gradient, which both exist during its backward pass."""
    return 2 * output_bytes


def _unfused(model: ModelSpec, size: Sizes, repeated: float, mask_bytes: float, softmax: float) -> list[Step]:
    """Return the operations of unfused attention: from query, keys and values to their mixture.

    Scores are masked in place, in a view, for which autograd copies their gradient twice; those in single precision are
    no view.  Their probabilities are copied, so that the mixture keeps its own.
    """
    copied = model.attention_dropout or softmax > size.scores
    per_head = repeated or size.keys
    values = per_head * model.value_head / (model.head + model.value_head)
    return [
        Step("product", repeated, size.query + size.mixed + per_head + size.scores),
        Step("causal mask", mask_bytes, values + 4 * size.scores),
        Step("softmax", softmax, values + 2 * softmax),
        Step("dropout", size.score_mask, values + 2 * size.scores),
        Step("mixture", size.scores if copied else 0.0, 2 * size.mixed + size.scores),
    ]


def _flash(model: ModelSpec, its: Parallel, size: Sizes) -> list[Step]:
    """Return flash attention's core: it keeps the softmax's statistics, one single-precision number per head and token.

    Its backward pass computes the scores again block by block, and sums the gradient of queries in single precision.
    """
    statistics = 4 * model.sequence / its.cp * its.microbatch * model.heads / its.tp
    summed = 4 / its.precision.weight_bytes * size.query
    copied = size.mixed if _is_turned(model, its) else 0.0
    return [Step("flash", statistics + copied, size.query + size.mixed + size.keys + summed + statistics)]


def _is_turned(model: ModelSpec, its: Parallel) -> bool:
    """Return True if attention's tensors are copied from one order to the other; one sample is in both orders."""
    return model.kernels.turned and its.microbatch > 1


def _again_of_mlp(model: ModelSpec, its: Parallel, size: Sizes) -> list[Step]:
    """Return the operations of the MLP or the experts; one that keeps their input alone if they are computed again."""
    norm, *steps = _mlp(model, its, size)
    if its.computes_again("moe" if model.experts else "mlp"):
        steps = [Step("mlp", size.residual, peak_bytes(steps) - size.residual + _again(size.residual))]
    return [norm, *steps]


def _mlp(model: ModelSpec, its: Parallel, size: Sizes) -> list[Step]:
    """Return the operations of the MLP, or of the experts, one after the other, with equal numbers of tokens."""
    weights = model.hidden * model.ffn / its.tp * _gradient_bytes(model, its)
    gates = 2 if model.swiglu else 1
    gradient = size.residual
    norm = Step("norm", size.residual, gradient + 2 * size.residual)
    again = its.computes_again("layernorm")
    if not model.experts:
        into = Step("into", size.input * size.residual, gradient + size.gated + size.whole + gates * weights)
        if again and not model.kernels.transformer_engine:
            into = _without_norm(into, into.kept_bytes)
        return [
            norm,
            into,
            Step("activation", size.gated + size.factors, gradient + size.ffn + size.gated),
            Step("out of", size.input * size.ffn, gradient + size.whole + size.ffn + weights),
        ]
    passes = model.experts_per_token
    each = passes * its.ep / model.experts  # share of a microbatch that one expert gets
    gathered = its.expert_width / its.tp  # experts of fewer ranks gather fewer tokens, and have more of their width
    routed = passes * size.whole * gathered
    weights /= gathered
    # Without a fused gate, the activation's output is kept to scale it by the router's probability.
    scaled = 0.0 if model.swiglu and model.kernels.fused_gate else passes * (size.ffn + size.factors)
    shared = _shared(model, its, size)
    entry = 0.0 if shared else size.residual  # the router and the shared experts keep one input
    out = 0.0 if its.computes_again("moe_act") else size.input * passes * size.ffn
    steps = [
        *shared,
        Step("routing", entry + size.input * routed, gradient + routed + its.ep * size.whole),
        Step("into", 0.0, gradient + 2 * routed + each * size.gated + gates * weights),
        Step("activation", passes * size.gated + scaled, gradient + 2 * routed + each * (size.ffn + size.gated)),
        Step("out of", out, gradient + 2 * routed + each * size.ffn + weights),
    ]
    if again and steps[0].kept_bytes >= size.residual:
        steps[0] = _without_norm(steps[0], size.residual)
    return [norm, *steps]


def _shared(model: ModelSpec, its: Parallel, size: Sizes) -> list[Step]:
    """Return the operations of the shared experts: before the routing, so after the experts' in the backward pass.

    They are an MLP that tensor parallelism divides as a dense one; the gradient that the router and the experts leave
    to their common input waits beside it (Megatron-core 0.19, ``MoELayer.forward``, without overlap).
    """
    if not model.shared_width:
        return []
    ffn, factors = (part * model.shared_width / model.ffn for part in (size.ffn, size.factors))
    gates = 2 if model.swiglu else 1
    weights = model.hidden * model.shared_width / its.tp * _gradient_bytes(model, its)
    gradient = 2 * size.residual
    steps = [
        Step("shared into", size.residual, gradient + gates * ffn + size.whole + gates * weights),
        Step("shared activation", gates * ffn + factors, gradient + ffn + gates * ffn),
        Step("shared out of", ffn, gradient + size.whole + ffn + weights),
    ]
    if its.computes_again("shared_experts"):
        return [Step("shared", size.residual, peak_bytes(steps) - size.residual + _again(size.residual))]
    return steps


def kept_bytes(tape: Sequence[Step]) -> float:
    """Return the bytes of the whole tape, after the forward pass."""
    return sum(step.kept_bytes for step in tape)


def peak_bytes(tape: Sequence[Step]) -> float:
    """Return the peak bytes of the tape and gradients in the backward pass."""
    held = most = 0.0
    for step in tape:
        held += step.kept_bytes
        most = max(most, held + step.working_bytes)
    return most

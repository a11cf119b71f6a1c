"""Every layout of a training on so many GPUs that Megatron starts, and why the others are none.

Three choices are made here and not searched, unless they are fixed, because in this model they never cost memory, nor
time but for one case:

* *Sequence parallelism* wherever tensor parallelism divides a rank's part of the sequence: its scatter and gather take
  as long as the all-reduce, what passes between stages is smaller, and activations are divided that were whole.
* *The distributed optimizer* wherever there are replicas: a reduce-scatter of gradients and an all-gather of weights,
  which are no larger than gradients, take no longer than an all-reduce, and each replica steps its part only.  And
  wherever weights are 8-bit numbers, which Megatron has with it alone.  With ``--overlap-grad-reduce`` and without
  ``--overlap-param-gather``, gradients are hidden and weights are not: experts with few replicas may then take
  longer, for less memory.
* *Recomputation* only where a layout does not fit without it: it adds to backward passes and takes nothing away.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import gcd
from typing import Any

from megatron.fill.wings.configure.details import detailed
from megatron.fill.wings.configure.flags import Training, counted_layers, in_flags, pairs
from megatron.fill.wings.configure.overlap import expert_problem
from megatron.fill.wings.configure.rules import ranks_problem
from megatron.fill.wings.mainjob.model import ModelSpec
from megatron.fill.wings.mainjob.order import MOST_PASSES
from megatron.fill.wings.mainjob.parallel import Parallel

_HELD = (
    "recompute",
    "recomputed",
    "recompute_modules",
    "expert_tp",
    "embedding_is_layer",
    "loss_is_layer",
    "optimizer_bytes",
    "later_stage",
)
_CHUNKS = (1, 2, 4, 8, 16)  # virtual stages of a rank where layers do not divide among the stages
_NO_CHUNKS = "with virtual stages, --pipeline-model-parallel-size is above 1, and --num-layers divides among them"
_GROUPS = (
    "virtual stages have groups of micro-batches (--global-batch-size, "
    "--microbatch-group-size-per-virtual-pipeline-stage) of at least --pipeline-model-parallel-size"
)
_NO_STAGES = "--num-layers is divided among the stages, but for the first and the last"
_SLOWER = 0.25  # layers that the last rank may be slower: layers take longer than their operations, which tell of it
_MOST_MICROBATCH = 64  # samples; more fit no GPU with any sequence worth dividing


def divisors(number: int) -> list[int]:
    """In order."""
    small = [its for its in range(1, int(number**0.5) + 1) if number % its == 0]
    return small + [number // its for its in reversed(small) if its * its != number]


def padded(training: Training, tp: int) -> ModelSpec:
    """The model with the vocabulary that Megatron makes of it, and with what flags say beside its shape.

    Where there are fewer query groups than tensor-parallel ranks, each rank has the keys of one (Megatron-core 0.19,
    ``SelfAttention``); their weights, which are divided further there, count as those of as many groups as ranks.
    """
    model = detailed(training.model, training.others)
    groups = tp if model.groups < tp and tp % model.groups == 0 and model.heads % tp == 0 else model.query_groups
    return replace(model, vocabulary=training.padded(tp), query_groups=groups)


def layouts(training: Training, gpus: int, gpus_per_node: int, excluded: Counter[str]) -> Iterator[Parallel]:
    """All that Megatron starts, without recomputation unless it is fixed.

    Tensor parallelism stays inside a node, as Megatron's authors advise (Narayanan et al. 2021, section 3.2).

    Args:
        excluded: counts, by the constraint, what is left out.
    """
    model, fixed = training.model, training.fixed
    for tp, cp in product(_choices("tp", divisors(gpus), fixed), _choices("cp", divisors(gpus), fixed)):
        divided = _divides_sequence(training, tp, cp)
        reason = _tensor_problem(model, tp, cp, divided, gpus, gpus_per_node)
        if reason:
            excluded[reason] += 1
            continue
        for pp in _choices("pp", divisors(gpus // (tp * cp)), fixed):
            if gpus % (tp * cp * pp) or (pp > model.layers and "stage_layers" not in fixed):
                excluded["--pipeline-model-parallel-size divides the GPUs and is at most --num-layers"] += 1
                continue
            dp = gpus // (tp * cp * pp)
            if training.global_batch % dp:
                excluded["--global-batch-size is a multiple of the data-parallel ranks"] += 1
                continue
            yield from _with_batches(training, tp, cp, pp, dp, excluded)


def _with_batches(training: Training, tp: int, cp: int, pp: int, dp: int, excluded: Counter[str]) -> Iterator[Parallel]:
    model, fixed, given = padded(training, tp), training.fixed, pairs(training.others)
    common: dict[str, Any] = {
        "tp": tp,
        "pp": pp,
        "dp": dp,
        "cp": cp,
        "global_batch": training.global_batch,
        "sequence_parallel": _divides_sequence(training, tp, cp),
        "precision": training.precision,
        "distributed_optimizer": fixed.get("distributed_optimizer", dp * cp > 1 or model.kernels.fp8_weights),
    }
    common |= {name: fixed[name] for name in _HELD if name in fixed}
    splits = _splits(model, fixed, pp)
    holders = tp * dp * cp // fixed.get("expert_tp", tp)  # ranks that may have different experts, each of that width
    experts = [its for its in divisors(max(1, holders)) if model.experts % its == 0] if model.experts else [1]
    batch = training.global_batch // dp
    for microbatch, ep in product(_choices("microbatch", divisors(batch), fixed), _choices("ep", experts, fixed)):
        if batch % microbatch or (microbatch > _MOST_MICROBATCH and "microbatch" not in fixed):
            excluded["--micro-batch-size divides the batch of a replica, and is at most 64"] += 1
            continue
        for split in _grouped(splits, fixed, pp, batch // microbatch, excluded):
            try:
                found = Parallel(**common, **split, microbatch=microbatch, ep=ep)
                found.check(model)
                reason = expert_problem(model, found) or ranks_problem(given, found)
            except ValueError as error:
                reason = in_flags(str(error))
            if reason:
                excluded[reason] += 1
            else:
                yield found


def _splits(model: ModelSpec, fixed: Mapping[str, Any], pp: int) -> dict[int, list[dict[str, Any]]]:
    """Return, for each number of virtual stages of a rank, how layers may be divided among stages."""
    layers = counted_layers(model.layers, fixed)
    counted = layers > model.layers
    given = fixed.get("stage_layers")
    by_hand = {name: fixed[name] for name in ("first_layers", "last_layers") if name in fixed}
    ends = by_hand or ({} if counted or given else _uneven(layers, pp))
    divided = pp == 1 or "stage_layers" in fixed or counted or by_hand
    last = 0.0 if divided else _last_layers(model)
    chunks = [1, *(its for its in divisors(layers // pp) if its > 1)]
    if by_hand:
        chunks = divisors(gcd(*by_hand.values()))
    elif ends:
        chunks = [1] if divided else [its for its in _CHUNKS if its * pp <= layers]
    found: dict[int, list[dict[str, Any]]] = {}
    for chunk in _choices("chunks", chunks, fixed):
        found[chunk] = []
        if chunk > 1 and pp == 1:
            continue
        if ends is not None and (chunk == 1 or by_hand or (not ends and (given or layers % (pp * chunk) == 0))):
            found[chunk].append(ends | {"stage_layers": given})
        if not divided:
            its = _balanced(layers, pp, chunk, last, model.dense_layers > 0)
            found[chunk] += [{"stage_layers": counts} for counts in its]
    return found


def _grouped(
    splits: Mapping[int, Sequence[dict[str, Any]]],
    fixed: Mapping[str, Any],
    pp: int,
    microbatches: int,
    excluded: Counter[str],
) -> Iterator[dict[str, Any]]:
    """Divisions of layers that a schedule takes with so many microbatches, with what the schedule has for them."""
    size = fixed.get("group_size", pp)
    rest = microbatches % size
    for chunk, found in splits.items():
        if not found:
            excluded[_NO_CHUNKS if chunk > 1 else _NO_STAGES] += 1
        elif 2 * microbatches * pp * chunk > MOST_PASSES:
            excluded[f"a replica has at most {MOST_PASSES:,} passes, two for each micro-batch and virtual stage"] += 1
        elif chunk == 1:
            yield from ({"schedule": "1f1b", **split} for split in found)
        elif pp <= size <= microbatches and (rest == 0 or rest >= pp):
            its = {"schedule": "interleaved", "chunks": chunk, "group_size": fixed.get("group_size")}
            yield from (its | split for split in found)
        else:
            excluded[_GROUPS] += 1


def _last_layers(model: ModelSpec) -> float:
    """Return the layers that take as long as what the last stage has beside its own; 8-bit layers take half."""
    kernels = model.kernels
    outputs = model.output_flops(1) * (2 if kernels.fp8 and not kernels.fp8_output else 1) * (1 + model.predicted)
    return outputs / model.layer_flops(1) + model.predicted


def _balanced(layers: int, pp: int, chunks: int, last: float, dense: bool = False) -> list[tuple[int, ...]]:
    """Return layers of the virtual stages with which the last rank has as much to do as others, output included.

    Its own are divided evenly among its chunks, or its last chunk has as much to do as others.  Ranks and chunks that
    have a layer more are the last ones, which hold the fewest microbatches.  If just one rank has, it may also be the
    first one, whose layers without experts exchange no tokens.  None if others would have as much as the last one has
    if layers are divided evenly, or would not gain half a layer.

    Args:
        last: layers that take as long as what the last stage has beside its own.
        dense: the first layers have no experts where others have some.
    """
    slowest = {own: max(own + last, -(-(layers - own) // (pp - 1))) for own in range(layers // pp + 1)}
    least = min(slowest.values())
    if layers % pp == 0 and layers // pp + last - least < 0.5:
        return []
    own = max(own for own, its in slowest.items() if its <= least + _SLOWER)
    each, rest = divmod(layers - own, pp - 1)
    ranks = [each + (rank >= pp - 1 - rest) for rank in range(pp - 1)]
    ends = {own // chunks, max(0, round((own + last) / chunks - last))} if chunks > 1 else {own}
    found = []
    for end in sorted(ends):
        virtual: list[int] = []
        for chunk in range(chunks):
            virtual += [count // chunks + (chunk >= chunks - count % chunks) for count in ranks]
            before = own - end  # on the last rank's chunks before the one with the output
            here = end if chunk == chunks - 1 else before // (chunks - 1) + (chunk < before % (chunks - 1))
            virtual.append(here)
        found.append(tuple(virtual))
        if dense and rest == 1 and pp > 2:
            longer = max(range(pp - 2, pp * chunks, pp), key=virtual.__getitem__)
            virtual[0], virtual[longer] = virtual[0] + 1, virtual[longer] - 1
            found.append(tuple(virtual))
    return found


def _choices(name: str, found: list[int], fixed: Any) -> list[int]:
    return [fixed[name]] if name in fixed else found


def _divides_sequence(training: Training, tp: int, cp: int) -> bool:
    """Return whether a layout has sequence parallelism, which Megatron ignores without tensor parallelism."""
    return tp > 1 and training.fixed.get("sequence_parallel", training.model.sequence % (cp * tp) == 0)


def _tensor_problem(model: ModelSpec, tp: int, cp: int, divided: bool, gpus: int, gpus_per_node: int) -> str:
    if tp > gpus_per_node or gpus % tp:
        return "--tensor-model-parallel-size stays inside a node and divides the GPUs"
    if model.heads % tp or (model.groups % tp and tp % model.groups) or model.ffn % tp or model.shared_width % tp:
        return (
            "--tensor-model-parallel-size divides heads, query groups and the width of MLP and shared experts: "
            f"{model.heads}, {model.groups}, {model.ffn} and {model.shared_width}"
        )
    if gpus % (tp * cp) or (cp > 1 and model.sequence % (2 * cp)):
        return "--context-parallel-size divides the GPUs and half of --seq-length"
    if divided and model.sequence % (cp * tp):
        return "with --sequence-parallel, --tensor-model-parallel-size * --context-parallel-size divides --seq-length"
    if model.experts and tp > 1 and not divided:
        return "with experts, --tensor-model-parallel-size above 1 has --sequence-parallel, and divides --seq-length"
    return ""


def _uneven(layers: int, pp: int) -> dict[str, int] | None:
    """Layers of the first and the last stage where not all can have as many; None if that does not help either."""
    if layers % pp == 0:
        return {}
    if pp == 2:
        return {"first_layers": (layers + 1) // 2, "last_layers": layers // 2}
    each = -(-layers // pp)
    rest = layers - each * (pp - 2)
    if rest < 2:
        return None
    return {"first_layers": rest - rest // 2, "last_layers": rest // 2}

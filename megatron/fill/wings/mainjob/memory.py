"""Parameters on one GPU of a stage; and its memory by the published formulas, for the simulator.

``held`` is the more exact accounting of ``pipefill configure``, of the kernels that flags choose, which a simulated
main job does not have.

Weights, gradients and optimizer state are counted as in ``megatron.training.theoretical_memory_usage``, but for each
stage instead of the fullest one; activations by Korthikanti et al. 2022 (arXiv 2205.05198), Table 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.fill.wings.mainjob.model import ModelSpec
from megatron.fill.wings.mainjob.parallel import Parallel, Recompute


@dataclass(frozen=True, slots=True)
class StageMemory:
    """The memory of one GPU in bytes; ``activations_bytes`` is the peak in an iteration."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes + self.activations_bytes


def stage_parameters(model: ModelSpec, parallel: Parallel, rank: int) -> float:
    """Return the number of parameters on one GPU of a stage.

    Tensor parallelism divides matrices and embeddings; every one of its ranks has the layer norms.  The last stage has
    the output layer's weights, tied or not, and BERT's heads, which tensor parallelism does not divide.
    """
    held = parallel.held(rank)
    dense, routed = _layers(model, parallel, held)
    later = sum(parallel.later(model, virtual) for virtual in held)
    routed += later
    matrices = routed * (model.matrix_parameters - model.expert_parameters) + dense * model.bare.matrix_parameters
    matrices += later * model.joined_parameters
    whole: float = (dense + routed) * model.norm_parameters
    if model.kernels.transformer_engine:  # each of its ranks has the projections to latents
        whole += (dense + routed) * model.down_parameters * (1 - 1 / parallel.tp)
    if 0 in held:
        whole += model.positions * model.hidden
    if parallel.pp * parallel.chunks - 1 in held:
        whole += model.final_norm_parameters + model.head_parameters
    matrices += embeddings(model, parallel, rank) * model.embedding_parameters
    return matrices / parallel.tp + whole + expert_parameters(model, parallel, rank)


def embeddings(model: ModelSpec, parallel: Parallel, rank: int) -> int:
    """Return the number of matrices of a stage that are as large as the embedding: it and the output layer."""
    held = parallel.held(rank)
    first, last = 0 in held, parallel.pp * parallel.chunks - 1 in held
    # the embedding, to predict later tokens
    later = not first and any(parallel.later(model, virtual) for virtual in held)
    return first + (last and (not first or not model.tied_embeddings)) + later


def expert_parameters(model: ModelSpec, parallel: Parallel, rank: int) -> float:
    """Return the number of experts' parameters in ``stage_parameters``; only every ``ep``-th replica has the same."""
    if not model.experts:
        return 0.0
    held = parallel.held(rank)
    _, layers = _layers(model, parallel, held)
    layers += sum(parallel.later(model, virtual) for virtual in held)
    return layers * model.expert_parameters / (parallel.expert_width * parallel.ep)


def optimizer_parameters(model: ModelSpec, parallel: Parallel, rank: int) -> float:
    """Return the number of parameters on one GPU of a stage that its optimizer has the state of."""
    parameters = stage_parameters(model, parallel, rank)
    if not parallel.distributed_optimizer:
        return parameters
    experts = expert_parameters(model, parallel, rank)
    return (parameters - experts) / parallel.replicas + experts / parallel.expert_replicas


def _layers(model: ModelSpec, parallel: Parallel, held: Sequence[int]) -> tuple[int, int]:
    """Return the number of layers without experts, where others have some, and of others in these virtual stages."""
    dense, every = (
        sum(each[virtual] for virtual in held) for each in (parallel.dense_layers(model), parallel.layers(model))
    )
    return dense, every - dense


def layer_activation_bytes(model: ModelSpec, parallel: Parallel, recompute: Recompute | None = None) -> float:
    """Return the bytes of activations that one layer keeps of one microbatch (Korthikanti et al. 2022, Table 2).

    In units of ``s b h`` bytes and without parallelism: ``34 + 5 a s / h``; without the attention's core 34, with full
    recomputation 2.  Tensor parallelism alone does not divide 10 of the 34.

    Args:
        recompute: None for that of ``parallel``.
    """
    kind = parallel.recompute if recompute is None else recompute
    unit = model.sequence / parallel.cp * parallel.microbatch * model.hidden * parallel.precision.weight_bytes / 2
    whole_divisor = parallel.tp if parallel.sequence_parallel else 1
    if kind is Recompute.FULL:
        return 2 * unit / whole_divisor
    # query and what goes into the projection; key and value
    attention = 2 * (model.query_width + model.mixed_width + model.keys_width) / model.hidden
    widths = model.ffn * model.experts_per_token + model.shared_width
    mlp = (6 if model.swiglu else 4) * widths / model.hidden
    core = 0.0 if kind is Recompute.SELECTIVE else 5 * model.heads * model.sequence / model.hidden
    return unit * (10 / whole_divisor + (attention + mlp + core) / parallel.tp)


def activation_bytes(model: ModelSpec, parallel: Parallel) -> tuple[int, ...]:
    """Return the bytes that each virtual stage, along the model, keeps of one microbatch.

    In addition to its layers' activations, the first keeps token ids and the embedding's dropout mask, and the last the
    output layer's input and, for the loss, the logits in single precision, as in ``compute_activation_memory``.
    """
    layer, bare = (layer_activation_bytes(its, parallel) for its in (model, model.bare))
    counts = list(zip(parallel.layers(model), parallel.dense_layers(model), strict=True))
    kept = [(count - dense) * layer + dense * bare for count, dense in counts]
    if parallel.recompute is Recompute.FULL:
        whole = [layer_activation_bytes(its, parallel, Recompute.NONE) for its in (model, model.bare)]
        for virtual, (count, dense) in enumerate(counts):
            again, again_dense = parallel.again(count), parallel.again(dense)
            kept[virtual] += (count - dense - again + again_dense) * (whole[0] - layer)
            kept[virtual] += (dense - again_dense) * (whole[1] - bare)
    if model.vocabulary:
        tokens = model.sequence / parallel.cp * parallel.microbatch
        divisor = parallel.tp if parallel.sequence_parallel else 1
        kept[0] += tokens * (8 + model.hidden) / divisor
        kept[-1] += 4 * tokens * (model.hidden / divisor + model.vocabulary / parallel.tp)
    return tuple(round(size) for size in kept)


def working_bytes(model: ModelSpec, parallel: Parallel) -> int:
    """Return the bytes recomputed at a time in a backward pass: those of one layer with full recomputation, else 0."""
    if parallel.recompute is not Recompute.FULL:
        return 0
    return round(layer_activation_bytes(model, parallel, Recompute.NONE))


def stage_memory(model: ModelSpec, parallel: Parallel, rank: int, activations_bytes: int) -> StageMemory:
    """Return the memory of one GPU of a stage.

    With BF16 it takes 18 bytes per parameter, or ``6 + 12 / dp`` with the distributed optimizer.

    Args:
        activations_bytes: peak of the activations kept there, as from ``pipeline.bubbles.peak_activation_bytes``.
    """
    parameters = stage_parameters(model, parallel, rank)
    precision = parallel.precision
    return StageMemory(
        weights_bytes=round(parameters * precision.weight_bytes),
        gradients_bytes=round(parameters * precision.gradient_bytes),
        optimizer_bytes=round(optimizer_parameters(model, parallel, rank) * parallel.state_bytes),
        activations_bytes=activations_bytes + working_bytes(model, parallel),
    )

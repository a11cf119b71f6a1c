"""The models that are trained to measure on a GPU, as Megatron's flags."""

from __future__ import annotations

from typing import Any

MODELS = {  # layers, hidden, heads, sequence, micro-batch
    "2.7b": (32, 2560, 32, 2048, 1),
    "1.3b": (24, 2048, 16, 2048, 2),
    "350m": (24, 1024, 16, 1024, 4),
    "tiny": (8, 128, 4, 64, 2),
}
# Untied, or the first and the last stage would exchange the embedding's gradients in every drain.  Python's garbage is
# not collected, as in NVIDIA's recipes: a full collection goes through all that Megatron has imported.
_COMMON = (
    "--lr 1e-4 --lr-decay-style constant --mock-data --tokenizer-type NullTokenizer --manual-gc",
    "--eval-iters 0 --eval-interval 1000000 --log-interval 1 --transformer-impl local",
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-rope-fusion --no-persist-layer-norm",
    "--untie-embeddings-and-output-weights --recompute-granularity selective",
)


def model_flags(
    model: str, device: str, stages: int, microbatches: int, schedule: str, timeout_minutes: int
) -> list[str]:
    """Those of a training of one of ``MODELS``, but for how long it is.

    Args:
        device: ``cuda`` or ``cpu``.
        microbatches: per iteration.
        schedule: ``1f1b`` or ``interleaved``.
        timeout_minutes: after which a rank that waits for another gives up.
    """
    layers, hidden, heads, sequence, micro_batch = MODELS[model]
    shape: dict[str, Any] = {
        "--pipeline-model-parallel-size": stages,
        "--num-layers": layers,
        "--hidden-size": hidden,
        "--num-attention-heads": heads,
        "--seq-length": sequence,
        "--max-position-embeddings": sequence,
        "--micro-batch-size": micro_batch,
        "--global-batch-size": micro_batch * microbatches,
        "--vocab-size": 255 if model == "tiny" else 32_000,
        "--distributed-timeout-minutes": timeout_minutes,
    }
    if schedule == "interleaved":
        shape["--num-layers-per-virtual-pipeline-stage"] = layers // (2 * stages)
    flags = [str(part) for pair in shape.items() for part in pair] + " ".join(_COMMON).split()
    return [*flags, *(["--bf16"] if device == "cuda" else [])]

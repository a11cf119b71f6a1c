"""Whether a layout fits the GPUs' memory: a bound that takes no schedule, and the peak of the schedule itself."""

from __future__ import annotations

from megatron.fill.configure.latency import compiled_schedule
from megatron.fill.mainjob.memory import StageMemory, activation_bytes, stage_memory
from megatron.fill.mainjob.model import ModelSpec
from megatron.fill.mainjob.parallel import Parallel
from megatron.fill.pipeline.bubbles import peak_activation_bytes
from megatron.fill.pipeline.schedules import interleaved_warmup


def least_bytes(model: ModelSpec, its: Parallel) -> int:
    """What the fullest GPU holds at least; with 1F1B exactly that.

    A rank of 1F1B holds the micro-batches of its warm-up and one more.  So it is with virtual stages, where what the
    ends of the model keep beside their layers counts once instead of for each micro-batch.
    """
    kept = activation_bytes(model, its)
    stages = (0,) if its.pp == 1 else (0, 1, its.pp - 1)  # memory falls from the second stage on
    return max(stage_memory(model, its, stage, _held(its, kept, stage)).total_bytes for stage in stages)


def _held(its: Parallel, kept: tuple[int, ...], stage: int) -> int:
    m, pp, own = its.microbatches, its.pp, kept[stage :: its.pp]
    if its.chunks == 1:
        return min(pp - stage, m) * own[0]
    warmup = interleaved_warmup(pp, m, its.chunks, pp, stage)
    return min(warmup + 1, m * its.chunks) * min(own)


def memory(model: ModelSpec, its: Parallel) -> tuple[StageMemory, ...]:
    """What a GPU of each stage holds at most, by the schedule."""
    kept = activation_bytes(model, its)
    peaks = peak_activation_bytes(compiled_schedule(its)[0].schedule, kept)
    return tuple(stage_memory(model, its, stage, peak) for stage, peak in enumerate(peaks))

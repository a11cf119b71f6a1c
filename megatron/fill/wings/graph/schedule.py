"""The microbatch schedule of each stage: the number of samples in flight, and the order of its passes."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.fill.pipeline.schedule import Op, Pass


def in_flight(successors: Sequence[Sequence[int]], micro_batches: Sequence[int], batch: int) -> tuple[int, ...]:
    """Samples in flight per stage: those between their forward and their backward pass there.

    ``i_x`` is the largest ``i_y + max(b_x, b_y)`` over the successors ``y`` of a stage ``x``, or ``b_x`` without
    successors, rounded up to whole microbatches and at most the batch.  This number keeps every stage busy.

    Args:
        successors: later stages that each stage sends to.
        micro_batches: samples per microbatch of each stage.
    """
    found = [0] * len(successors)
    for stage in reversed(range(len(successors))):
        mine = micro_batches[stage]
        found[stage] = max(
            (upstream(found[to], micro_batches[to], mine, batch) for to in successors[stage]), default=mine
        )
    return tuple(found)


def upstream(in_flight: int, micro_batch: int, mine: int, batch: int) -> int:
    """Samples in flight that a stage needs for one successor.

    Args:
        in_flight: samples in flight in the successor.
        micro_batch: samples per microbatch of the successor.
        mine: samples per microbatch of the stage itself.
    """
    needed = in_flight + max(micro_batch, mine)
    return min(batch, -(-needed // mine) * mine)


def group(micro_batch: int, successors: Sequence[int]) -> int:
    """The *k* of kFkB: ``k`` forward passes alternate with ``k`` backward passes.

    ``k`` passes make up one microbatch of the successor with the smallest one (``successors`` has the samples per
    microbatch of each), which must not wait until the others' larger microbatches are complete.
    """
    return max(1, min(successors, default=micro_batch) // micro_batch)


def passes(batch: int, micro_batch: int, in_flight: int, k: int) -> tuple[Op, ...]:
    """A stage's passes of an iteration in order: forward up to ``in_flight`` samples, then ``k`` B and ``k`` F."""
    count = batch // micro_batch
    warm = min(count, max(1, in_flight // micro_batch))
    order = [Op(Pass.FORWARD, at) for at in range(warm)]
    forward, backward = warm, 0
    while backward < count:
        back = min(k, warm, count - backward)
        order += [Op(Pass.BACKWARD, at) for at in range(backward, backward + back)]
        backward += back
        more = min(back, count - forward)
        order += [Op(Pass.FORWARD, at) for at in range(forward, forward + more)]
        forward += more
    return tuple(order)

"""The micro-batch schedule of each stage: how many samples are in flight, and in which order passes run."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.fill.pipeline.schedule import Op, Pass


def in_flight(successors: Sequence[Sequence[int]], micro_batches: Sequence[int], batch: int) -> tuple[int, ...]:
    """Samples in flight per stage: those that have had their forward pass there and not yet their backward pass.

    ``i_x`` is the largest ``i_y + max(b_x, b_y)`` over the successors ``y`` of a stage ``x``, and ``b_x`` where there
    is none; made up to whole micro-batches, and at most the batch.  It is what keeps every stage busy.

    Args:
        successors: per stage, later ones only.
        micro_batches: per stage, its samples.
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
        in_flight: of the successor.
        micro_batch: of the successor, too.
        mine: the stage's own micro-batch.
    """
    needed = in_flight + max(micro_batch, mine)
    return min(batch, -(-needed // mine) * mine)


def group(micro_batch: int, successors: Sequence[int]) -> int:
    """The *k* of kFkB: so many forward passes, then so many backward passes, in turn.

    As many as make up one micro-batch of the successors; of the successor with the smallest one, since the others must
    not be waited for with their samples on the way.

    Args:
        successors: their micro-batches.
    """
    return max(1, min(successors, default=micro_batch) // micro_batch)


def passes(batch: int, micro_batch: int, in_flight: int, k: int) -> tuple[Op, ...]:
    """A stage's passes of an iteration in order: forward passes up to ``in_flight`` samples, then kBkF in turn."""
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

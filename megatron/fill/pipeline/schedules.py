"""The schedules that Megatron runs (1F1B, interleaved 1F1B, GPipe by a patch) and ZB-H1, as data."""

from __future__ import annotations

from collections.abc import Iterable

from megatron.fill.pipeline.schedule import NAMES, Op, Pass, Schedule

F, B, INPUT, WEIGHT = Pass.FORWARD, Pass.BACKWARD, Pass.INPUT, Pass.WEIGHT


def gpipe(stages: int, microbatches: int) -> Schedule:
    """GPipe: all forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965).

    The backwards begin with microbatch 0, as in PipeFill's patch of Megatron, and not with the last microbatch as in
    the paper: the bubbles are the same, and gradients are summed in 1F1B's order.

    Raises:
        ValueError: there is not at least one stage and one microbatch.
    """
    _check_counts(stages, microbatches)
    row = [Op(kind, microbatch) for kind in (F, B) for microbatch in range(microbatches)]
    return _schedule("gpipe", microbatches, 1, (row for _ in range(stages)))


def one_forward_one_backward(stages: int, microbatches: int) -> Schedule:
    """1F1B, without a flush inside the iteration (Narayanan et al. 2021, arXiv 2104.04473, section 2.2.1).

    Raises:
        ValueError: there is not at least one stage and one microbatch.
    """
    _check_counts(stages, microbatches)
    forwards = [Op(F, microbatch) for microbatch in range(microbatches)]
    backwards = [Op(B, microbatch) for microbatch in range(microbatches)]
    rows = (_in_turn(forwards, backwards, min(stages - rank - 1, microbatches)) for rank in range(stages))
    return _schedule("1f1b", microbatches, 1, rows)


def interleaved(stages: int, microbatches: int, chunks: int, group_size: int | None = None) -> Schedule:
    """Interleaved 1F1B (Narayanan et al. 2021, section 2.2.2), in Megatron's order.

    Args:
        stages: number of ranks.
        microbatches: number of microbatches.
        chunks: number of chunks of the model per rank.
        group_size: number of microbatches that a rank runs on a chunk before it takes the next: Megatron's
            ``--microbatch-group-size-per-virtual-pipeline-stage``; None for ``stages``.

    Raises:
        ValueError: Megatron refuses to run it: there are fewer than two stages or chunks, the group size is outside of
            ``stages`` to ``microbatches``, or the last group is smaller than ``stages``.
    """
    _check_counts(stages, microbatches)
    if stages < 2 or chunks < 2:
        raise ValueError(f"interleaved with {stages} stages and {chunks} chunks; expected at least 2 of each")
    group = stages if group_size is None else group_size
    if not stages <= group <= microbatches:
        raise ValueError(f"group_size is {group}; expected {stages} (stages) to {microbatches} (microbatches)")
    if 0 < microbatches % group < stages:
        raise ValueError(
            f"the last of the groups of {group} has {microbatches % group} of {microbatches} microbatches;"
            f" expected at least {stages} (stages)"
        )
    table = [
        (microbatch, chunk)
        for first in range(0, microbatches, group)
        for chunk in range(chunks)
        for microbatch in range(first, min(first + group, microbatches))
    ]
    forwards = [Op(F, microbatch, chunk) for microbatch, chunk in table]
    backwards = [Op(B, microbatch, chunks - chunk - 1) for microbatch, chunk in table]
    rows = (
        _in_turn(forwards, backwards, interleaved_warmup(stages, microbatches, chunks, group, rank))
        for rank in range(stages)
    )
    return _schedule("interleaved", microbatches, chunks, rows)


def interleaved_warmup(stages: int, microbatches: int, chunks: int, group_size: int, rank: int) -> int:
    """The number of forwards that a rank runs before it alternates forwards and backwards."""
    return min((stages - rank - 1) * 2 + (chunks - 1) * group_size, microbatches * chunks)


def zb_h1(stages: int, microbatches: int) -> Schedule:
    """ZB-H1 (Qi et al. 2023, arXiv 2401.10241, section 2.1): 1F1B with split backwards.

    A rank delays its weight passes by as many microbatches as there are ranks before it.  So each rank holds at most
    ``stages`` microbatches, 1F1B's peak, and has weight passes left for the time in which others drain.

    Raises:
        ValueError: there is not at least one stage and one microbatch.
    """
    _check_counts(stages, microbatches)
    rows = []
    for rank in range(stages):
        row: list[Op] = []
        warmup = min(stages - rank - 1, microbatches)
        row += [Op(F, microbatch) for microbatch in range(warmup)]
        for microbatch in range(microbatches):
            if warmup + microbatch < microbatches:
                row.append(Op(F, warmup + microbatch))
            row.append(Op(INPUT, microbatch))
            if microbatch >= rank:
                row.append(Op(WEIGHT, microbatch - rank))
        row += [Op(WEIGHT, microbatch) for microbatch in range(max(0, microbatches - rank), microbatches)]
        rows.append(row)
    return _schedule("zb-h1", microbatches, 1, rows)


def make_schedule(
    name: str, stages: int, microbatches: int, chunks: int = 1, group_size: int | None = None
) -> Schedule:
    """Build a schedule by its name, one of ``NAMES``.

    Raises:
        ValueError: the name is unknown, or the schedule does not accept an argument.
    """
    if name == "interleaved":
        return interleaved(stages, microbatches, chunks, group_size)
    if name not in NAMES:
        raise ValueError(f"{name!r} is not a schedule; expected one of {', '.join(NAMES)}")
    if chunks != 1:
        raise ValueError(f"{name} with {chunks} chunks; expected 1: only interleaved has more")
    if group_size is not None:
        raise ValueError(f"{name} with a group_size of {group_size}; expected none: only interleaved has one")
    return {"gpipe": gpipe, "1f1b": one_forward_one_backward, "zb-h1": zb_h1}[name](stages, microbatches)


def _in_turn(forwards: list[Op], backwards: list[Op], warmup: int) -> list[Op]:
    pairs = zip(forwards[warmup:], backwards, strict=False)
    steady = [op for pair in pairs for op in pair]
    return [*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :]]


def _check_counts(stages: int, microbatches: int) -> None:
    if stages < 1 or microbatches < 1:
        raise ValueError(f"{stages} stages and {microbatches} microbatches; expected at least 1 of each")


def _schedule(name: str, microbatches: int, chunks: int, rows: Iterable[list[Op]]) -> Schedule:
    order = tuple(map(tuple, rows))
    return Schedule(name, len(order), microbatches, chunks, order)

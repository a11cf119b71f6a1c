"""The schedules that Megatron runs (1F1B, interleaved 1F1B, GPipe by a patch), and published ones that it does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import accumulate

from megatron.fill.pipeline.schedule import Op, Pass, Schedule

F, B, INPUT, WEIGHT = Pass.FORWARD, Pass.BACKWARD, Pass.INPUT, Pass.WEIGHT


def gpipe(stages: int, microbatches: int) -> Schedule:
    """GPipe: all forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965).

    The backwards begin with microbatch 0, as in PipeFill's patch of Megatron, and not with the last microbatch as in
    the paper: the bubbles are the same, and gradients are summed in 1F1B's order.
    """
    row = [Op(kind, microbatch) for kind in (F, B) for microbatch in range(microbatches)]
    return _schedule("gpipe", microbatches, 1, (row for _ in range(stages)))


def one_forward_one_backward(stages: int, microbatches: int) -> Schedule:
    """1F1B, without a flush inside the iteration (Narayanan et al. 2021, arXiv 2104.04473, section 2.2.1)."""
    forwards = [Op(F, microbatch) for microbatch in range(microbatches)]
    backwards = [Op(B, microbatch) for microbatch in range(microbatches)]
    rows = (_in_turn(forwards, backwards, min(stages - rank - 1, microbatches)) for rank in range(stages))
    return _schedule("1f1b", microbatches, 1, rows)


def interleaved(stages: int, microbatches: int, chunks: int, group_size: int | None = None) -> Schedule:
    """Interleaved 1F1B (Narayanan et al. 2021, section 2.2.2), in Megatron's order.

    Args:
        chunks: number of chunks of the model per rank.
        group_size: number of microbatches that a rank runs on a chunk before it takes the next: Megatron's
            ``--microbatch-group-size-per-virtual-pipeline-stage``; None for ``stages``.

    Raises:
        ValueError: Megatron refuses to run it: there are fewer than two stages or chunks, the group size is outside of
            ``stages`` to ``microbatches``, or the last group is smaller than ``stages``.
    """
    if stages < 2 or chunks < 2:
        raise ValueError(f"interleaved with {stages} stages and {chunks} chunks; expected at least 2 of each")
    if microbatches < stages:
        raise ValueError(f"interleaved with {microbatches} microbatches; expected at least {stages}, one per stage")
    group = stages if group_size is None else group_size
    if not stages <= group <= microbatches:
        raise ValueError(f"group_size is {group}; expected {stages} (stages) to {microbatches} (microbatches)")
    if 0 < microbatches % group < stages:
        last = f"the last of the groups of {group} has {microbatches % group} of {microbatches} microbatches"
        raise ValueError(f"{last}; expected at least {stages} (stages)")
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


def looped_bfs(stages: int, microbatches: int, chunks: int) -> Schedule:
    """Breadth-first looped pipeline (Lamy-Poirier 2022, arXiv 2211.05953): all microbatches of a chunk in a row."""
    forwards = [Op(F, microbatch, chunk) for chunk in range(chunks) for microbatch in range(microbatches)]
    row = forwards + [Op(B, op.microbatch, op.chunk) for op in reversed(forwards)]
    return _schedule("looped-bfs", microbatches, chunks, (row for _ in range(stages)))


def zb_h1(stages: int, microbatches: int) -> Schedule:
    """ZB-H1 (Qi et al. 2023, arXiv 2401.10241, section 2.1): 1F1B with split backwards.

    A rank delays its weight passes by as many microbatches as there are ranks before it.  So each rank holds at most
    ``stages`` microbatches, 1F1B's peak, and has weight passes left for the time in which others drain.
    """
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


def zb_v(stages: int, microbatches: int) -> Schedule:
    """ZB-V (Qi et al. 2024, arXiv 2405.15362, V-ZB): two chunks in the shape of a V, weight passes right behind.

    The schedule is that of at least ``2 * stages - 1`` microbatches, without those that there are not.
    """
    count = max(2 * stages - 1, microbatches)
    rows = (
        _in_phases(
            [
                (2 * (stages - rank) - 1, "F0"),
                (rank, "F1 F0"),
                (stages - rank, "F1 I1 W1"),
                (count - 2 * stages + rank + 1, "F0 I0 W0 F1 I1 W1"),
                (stages - rank - 1, "I0 W0 F1 I1 W1"),
                (rank, "I0 I1"),
                (stages - rank, "I0 W0"),
                (rank, "W1"),
                (rank, "W0"),
            ]
        )
        for rank in range(stages)
    )
    there = ([op for op in row if op.microbatch < microbatches] for row in rows)
    return _schedule("zb-v", microbatches, 2, there, _v_shape(stages))


def dualpipe_v(stages: int, microbatches: int) -> Schedule:
    """DualPipeV (DeepSeek 2025): DualPipe cut in half, so that a rank holds two chunks and no weights twice.

    A forward and a backward pass of different chunks form one action, to overlap one's communication with the other.

    Raises:
        ValueError: there is not at least one stage, or there are fewer than two microbatches per stage.
    """
    if microbatches < 2 * stages:
        raise ValueError(f"dualpipe-v with {microbatches} microbatches; expected at least {2 * stages}, two per stage")
    rows, together = [], set()
    for rank in range(stages):
        later, main = stages - rank - 1, microbatches - 2 * stages + rank + 1
        first = "F0 B1 F1+B0" if rank == stages - 1 else "F0+B1 F1+B0"  # the last rank has nothing to overlap with yet
        whole, odd = (rank + 1) // 2, rank % 2
        phases = [
            (2 * later, "F0"),
            (rank + 1, "F0 F1"),
            (later, "I1 W F1"),
            (1, first),
            (main - 1, "F0+B1 F1+B0"),
            (later, "B1 F1+B0"),
            (whole, "B1 B0"),
            (1 - odd, "B1 I0"),
            (whole, "I1 I0"),
            (later, "W I0"),
            (rank + 1, "W"),
        ]
        rows.append(_in_phases(phases))
        tokens = [token for times, pattern in phases for _ in range(times) for token in pattern.split()]
        ends = accumulate(1 + token.count("+") for token in tokens)
        together |= {(rank, end - 2) for token, end in zip(tokens, ends, strict=True) if "+" in token}
    return _schedule("dualpipe-v", microbatches, 2, rows, _v_shape(stages), frozenset(together))


type _Maker = Callable[[int, int], Schedule]
_ONE_CHUNK: dict[str, _Maker] = {"gpipe": gpipe, "1f1b": one_forward_one_backward, "zb-h1": zb_h1}
V_SHAPED: dict[str, _Maker] = {"zb-v": zb_v, "dualpipe-v": dualpipe_v}
NAMES = ("gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-v", "dualpipe-v")


def usual_chunks(name: str) -> int:
    """The number of chunks per rank that a schedule of this name has unless it is given: the least that it accepts."""
    return 1 if name in _ONE_CHUNK else 2


@lru_cache(maxsize=4)  # ``megatrons`` asks again for what was just made
def make_schedule(
    name: str, stages: int, microbatches: int, chunks: int = 1, group_size: int | None = None
) -> Schedule:
    """Build a schedule by its name, one of ``NAMES``; ValueError if it does not accept an argument."""
    if name == "interleaved":
        return interleaved(stages, microbatches, chunks, group_size)
    if name not in NAMES:
        raise ValueError(f"{name!r} is not a schedule; expected one of {', '.join(NAMES)}")
    if group_size is not None:
        raise ValueError(f"{name} with a group_size of {group_size}; expected none: only interleaved has one")
    if name == "looped-bfs":
        return looped_bfs(stages, microbatches, chunks)
    if chunks != usual_chunks(name):
        raise ValueError(f"{name} with {chunks} chunks; expected {usual_chunks(name)}")
    return (_ONE_CHUNK | V_SHAPED)[name](stages, microbatches)


def megatrons(schedule: Schedule) -> tuple[str, int | None] | None:
    """Return which of the schedules that Megatron runs has exactly these passes, whatever the schedule's own name is.

    Returned are its name and group size, as for ``make_schedule``; None if Megatron runs no such order.
    """
    row = schedule.order[0]
    group = next(at for at, op in enumerate(row) if op != Op(F, at))
    for name, size in [("interleaved", group)] if schedule.chunks > 1 else [("1f1b", None), ("gpipe", None)]:
        try:
            its = make_schedule(name, schedule.stages, schedule.microbatches, schedule.chunks, size)
        except ValueError:
            continue
        if (its.order, its.placement, its.together) == (schedule.order, schedule.placement, schedule.together):
            return name, size
    return None


def _in_phases(phases: Iterable[tuple[int, str]]) -> list[Op]:
    """Write out a rank's passes, phase by phase: the number of repetitions, and the pattern.

    ``F0`` is the next forward pass on chunk 0, ``I0`` and ``B0`` the next backward pass, ``W0`` the oldest weight pass
    of the chunk that is due, ``W`` that of any chunk, and nothing if none is due.  ``F0+B1`` is one action.
    """
    counts: Counter[tuple[bool, int]] = Counter()
    due: list[Op] = []
    row = []
    for times, pattern in phases:
        for token in pattern.replace("+", " ").split() * max(0, times):
            kind = Pass(token[0])
            if kind is WEIGHT:
                op = next((op for op in due if token[1:] in ("", str(op.chunk))), None)
                if op is not None:
                    due.remove(op)
                    row.append(op)
                continue
            chunk = int(token[1:])
            microbatch = counts[kind is F, chunk]
            counts[kind is F, chunk] += 1
            row.append(Op(kind, microbatch, chunk))
            if kind is INPUT:
                due.append(Op(WEIGHT, microbatch, chunk))
    return row


def _v_shape(stages: int) -> tuple[int, ...]:
    return (*range(stages), *reversed(range(stages)))


def _in_turn(forwards: list[Op], backwards: list[Op], warmup: int) -> list[Op]:
    pairs = zip(forwards[warmup:], backwards, strict=False)
    steady = [op for pair in pairs for op in pair]
    return [*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :]]


def _schedule(
    name: str,
    microbatches: int,
    chunks: int,
    rows: Iterable[list[Op]],
    placement: tuple[int, ...] = (),
    together: frozenset[tuple[int, int]] = frozenset(),
) -> Schedule:
    order = tuple(map(tuple, rows))
    return Schedule(name, len(order), microbatches, chunks, order, placement, together)

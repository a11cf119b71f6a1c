"""scripts/benchmarks/lateness.py: how late waits end, from the records of two stages."""

from __future__ import annotations

from dataclasses import replace

from megatron.fill.types import Bubble, BubbleKind, Iteration, RankInfo, RankRecord, Span
from scripts.benchmarks.lateness import compare, late_ns
from scripts.benchmarks.trainings import Blocks

MS = 1_000_000


def records(late_ms: dict[int, int]) -> list[RankRecord]:
    """Iterations of 100 ms: stage 1 waits for a forward of stage 0, and the iteration ends 5 ms after the last pass.

    Args:
        late_ms: by iteration, how long after the forward's end the wait ends.
    """
    ranks: list[tuple[list[Bubble], list[Span]]] = [([], []), ([], [])]
    iterations = []
    for number, late in late_ms.items():
        start = (number - 1) * 100 * MS
        iterations.append(Iteration(number, start, start + 100 * MS))
        ranks[0][1].append(Span("forward", number, start, start + 30 * MS))
        ranks[1][0].append(Bubble(number, 0, BubbleKind.FILL, start, start + (30 + late) * MS))
        # A wait for something else than a pass, and one of the drain, are not told from passes.
        ranks[1][0].append(Bubble(number, 1, BubbleKind.INTERIOR, start + 60 * MS, start + 61 * MS))
        ranks[1][1].append(Span("backward", number, start + 61 * MS, start + 95 * MS))
        ranks[0][0].append(Bubble(number, 0, BubbleKind.DRAIN, start + 30 * MS, start + 99 * MS))
    return [
        RankRecord(RankInfo(rank, 2, rank, 2, 0, 1, rank, 2), iterations, bubbles, spans)
        for rank, (bubbles, spans) in enumerate(ranks)
    ]


def test_a_wait_is_as_late_as_it_ends_after_the_pass_that_it_is_for_and_the_iteration_after_the_last_pass():
    assert late_ns(records({1: 3, 2: 0})) == {1: 8 * MS, 2: 5 * MS}


def test_what_filling_adds_is_told_from_the_blocks_without_it():
    blocks = Blocks(length=2, pairs=2, warmup=1)
    late_ms = {number: 4 if blocks.fills(number) else 1 for number in range(1, 10)}
    found = compare(records(late_ms), blocks)
    assert found["late_ms"] == {"with": 9.0, "without": 6.0}
    assert (found["added_ms"], found["ci95_ms"], found["iterations"]) == (3.0, [3.0, 3.0], 8)
    assert found["share"] == 0.03


def test_iterations_that_nobody_watched_do_not_count():
    blocks = Blocks(length=2, pairs=2, warmup=1)
    ranks = [
        replace(
            record,
            bubbles=[bubble for bubble in record.bubbles if bubble.iteration != 3],
            spans=[span for span in record.spans if span.iteration != 3],
        )
        for record in records({number: 4 if blocks.fills(number) else 1 for number in range(1, 10)})
    ]
    assert 3 not in late_ns(ranks)
    found = compare(ranks, blocks)
    assert (found["added_ms"], found["iterations"]) == (3.0, 7)

"""Bubbles filled in virtual time: against closed forms, and against the rank's own listener."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.fill.pages.gate import OpenBubble
from megatron.fill.pipeline.timeline import Wait
from megatron.fill.rank.listener import RankListener
from megatron.fill.rank.predictor import BubblePredictor
from megatron.fill.rank.recorder import Recorder
from megatron.fill.rank.rule import FillRule
from megatron.fill.types import Bubble, BubbleKind, BubbleUse, CycleKey, RankInfo, WorkerRecord
from scripts.benchmarks.studies.truth.replay import Opened, PlayedIteration, open_bubbles, replay
from scripts.benchmarks.studies.truth.steps import StepTimes, step_times
from scripts.benchmarks.studies.truth.virtual import Core

MS = 1_000_000
KEY = CycleKey("1f1b", 4)
INFO = RankInfo(rank=0, world_size=2, local_rank=0, local_world_size=2, node=0, nodes=1, stage=0, stages=2)


def bubble(seq: int, start_ms: float, end_ms: float, predicted_ms: float | None = None) -> Bubble:
    predicted_ms = end_ms - start_ms if predicted_ms is None else predicted_ms
    start_ns, end_ns = int(start_ms * MS), int(end_ms * MS)
    return Bubble(1, 0, BubbleKind.FILL, start_ns, end_ns, int(predicted_ms * MS), seq, filling=bool(seq))


def opened(bubbles: list[Bubble], guard_ns: int = 0) -> Opened:
    """Gates that say what was predicted."""
    return Opened(
        bubbles,
        {
            its.seq: OpenBubble(its.seq, its.start_ns, its.start_ns + its.predicted_ns - guard_ns, 0)
            for its in bubbles
            if its.seq
        },
    )


def even_bubbles(count: int, duration_ns: int) -> list[Bubble]:
    return [
        Bubble(at, 0, BubbleKind.FILL, at * 10**9, at * 10**9 + duration_ns, duration_ns, at, filling=True)
        for at in range(1, count + 1)
    ]


@settings(max_examples=60, deadline=None)
@given(
    duration_ns=st.integers(5 * MS, 200 * MS),
    step_ns=st.integers(MS // 2, 5 * MS),
    wake_ns=st.integers(0, MS),
    gap_ns=st.integers(0, MS // 10),
    count=st.integers(1, 6),
)
def test_even_steps_fill_even_bubbles_as_the_closed_form_says(
    duration_ns: int, step_ns: int, wake_ns: int, gap_ns: int, count: int
) -> None:
    times = StepTimes((step_ns,), (wake_ns,), gap_ns, work=3.0)
    done = replay(opened(even_bubbles(count, duration_ns)), times)
    steps = (duration_ns - wake_ns + gap_ns) // (step_ns + gap_ns)  # no gap before the first one
    # Of the first step nothing is known yet, so it is tried in any case; there is room for it here, mostly.
    if wake_ns + step_ns <= duration_ns:
        assert [use.steps for use in done.uses] == [steps] * count
        assert all(use.harvested_ns == steps * step_ns and use.overrun_ns == 0 for use in done.uses)
        assert all(use.latency_ns == wake_ns for use in done.uses)
        assert done.work_done == 3.0 * steps * count


def test_a_step_caught_by_the_end_goes_on_in_the_next_wait() -> None:
    # Predicted to last 10 ms, the first bubble ends after 5; its third step has 1 ms left then.
    waits = [bubble(1, 0, 5, 10), bubble(0, 20, 20.5), bubble(2, 30, 40)]
    done = replay(opened(waits), StepTimes((2 * MS,)))
    first, second = done.uses
    assert (first.steps, first.harvested_ns, first.overrun_ns) == (3, 5 * MS + 0, int(25.5 * MS))
    # Half a millisecond went by in the wait that was not filled, and half in the next bubble, before its own steps.
    assert (second.steps, second.latency_ns, second.harvested_ns) == (4, -1, 8 * MS + MS // 2)


def test_a_bubble_that_is_over_before_the_worker_is_awake_is_lost() -> None:
    done = replay(opened([bubble(1, 5, 6), bubble(2, 10, 20)]), StepTimes((2 * MS,), (3 * MS, MS)))
    assert [use.seq for use in done.uses] == [2]


def test_no_step_starts_that_does_not_fit_before_the_guard() -> None:
    waits = even_bubbles(3, 10 * MS)
    assert [use.steps for use in replay(opened(waits, 2 * MS), StepTimes((3 * MS,))).uses] == [2, 2, 2]


def test_no_bubbles_no_work() -> None:
    assert replay(opened([]), StepTimes((MS,))).uses == []
    assert replay(opened([bubble(0, 0, 50)]), StepTimes((MS,))).work_done == 0.0


@pytest.mark.parametrize(
    ("values", "expected"),
    [({"steps_ns": ()}, "steps"), ({"steps_ns": (0,)}, "longer"), ({"steps_ns": (1,), "wakes_ns": (-1,)}, "negative")],
)
def test_times_that_cannot_be_are_refused(values: dict[str, tuple[int, ...]], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        StepTimes(**values)  # type: ignore[arg-type]


class _Gate:
    def __init__(self) -> None:
        self.seq = 0
        self.told: dict[int, tuple[int, tuple[int, ...], int]] = {}

    def open(self, deadline_ns: int, free_bytes: int, ends_ns: Sequence[int] = (), overrun_ns: int = 0) -> int:
        self.seq += 1
        self.told[self.seq] = (deadline_ns, tuple(ends_ns), overrun_ns)
        return self.seq

    def close(self, now_ns: int) -> None:
        pass

    def brake(self, on: bool) -> None:
        pass

    def end(self) -> None:
        pass


@settings(max_examples=25, deadline=None)
@given(
    durations=st.lists(st.tuples(*[st.integers(0, 30 * MS)] * 3), min_size=1, max_size=40),
    warmup=st.integers(1, 6),
    block=st.integers(0, 4),
    overrun=st.sampled_from([0.0, 0.01]),
)
def test_bubbles_open_as_the_rank_opens_them(
    durations: list[tuple[int, ...]], warmup: int, block: int, overrun: float
) -> None:
    recorder = Recorder(INFO, 3)
    rule = FillRule(warmup=warmup, overrun=overrun)
    gate, predictor = _Gate(), BubblePredictor(rule)
    listener = RankListener(gate, recorder, predictor, lambda: 0, paired_blocks=block)
    kinds = (BubbleKind.FWD_BWD, BubbleKind.INTERIOR, BubbleKind.DRAIN)
    played = []
    for at, row in enumerate(durations):
        begin = at * 200 * MS
        listener.iteration_started(at + 1, begin)
        listener.cycle_started(KEY, begin)
        ends = list(accumulate(10 * MS + duration for duration in row))
        waits = [Wait(kind, end - length, end) for kind, end, length in zip(kinds, ends, row, strict=True)]
        for index, wait in enumerate(waits):
            listener.bubble_opened(wait.kind, index, begin + wait.start_ns)
            listener.bubble_closed(begin + wait.end_ns)
        listener.iteration_ended(begin + 190 * MS)
        played.append(PlayedIteration(at + 1, begin, waits, recorder.iterations[-1].filling))
    found = open_bubbles(played, KEY, rule)
    assert found.bubbles == recorder.bubbles
    told = {seq: (one.deadline_ns, one.ends_ns, one.overrun_ns) for seq, one in found.told.items()}
    assert told == gate.told


def test_step_times_are_those_on_the_core() -> None:
    waits = [bubble(1, 0, 10), bubble(0, 20, 21), bubble(2, 30, 40)]
    steps = [(2, 5), (6, 9), (9.5, 32), (33, 36)]  # the third one is on the core for 0.5 + 1 + 2 ms
    uses = [BubbleUse(1, 2 * MS, 0, 0, 3), BubbleUse(2, 3 * MS, 0, 0, 1)]
    record = WorkerRecord("job", 0, 4, 8.0, 0, 0, 0.0, uses, [(int(start * MS), int(end * MS)) for start, end in steps])
    times = step_times(record, waits)
    # It was interrupted twice; that cost all that it took longer than the others, as far as its waits went.
    assert times.steps_ns == (3 * MS,) * 4
    assert times.resume_ns == MS // 4
    assert times.gap_ns == MS
    assert times.work == 2.0
    # Into the second bubble the worker came with a step in flight, so that says nothing of waking up.
    assert times.wakes_ns == (2 * MS,)


def test_steps_of_other_iterations_can_be_left_out() -> None:
    waits = [bubble(1, 0, 10)]
    record = WorkerRecord("job", 0, 1, 1.0, 0, 0, 0.0, [], [(MS, 2 * MS)])
    assert step_times(record, waits, {1}).steps_ns == (MS,)
    with pytest.raises(ValueError, match="job 'job'"):
        step_times(record, waits, {2})


@settings(max_examples=20, deadline=None)
@given(step_ns=st.integers(MS, 4 * MS), duration_ns=st.integers(10 * MS, 50 * MS))
def test_what_was_replayed_gives_its_steps_back(step_ns: int, duration_ns: int) -> None:
    waits = even_bubbles(4, duration_ns)
    times = StepTimes((step_ns,), (MS // 4,), 1000)
    steps = []
    for use, at in zip(replay(opened(waits), times).uses, waits, strict=True):
        begins = [at.start_ns + MS // 4 + step * (step_ns + 1000) for step in range(use.steps)]
        steps += [(begin, begin + step_ns) for begin in begins]
    record = WorkerRecord("job", 0, len(steps), float(len(steps)), 0, 0, 0.0, replay(opened(waits), times).uses, steps)
    found = step_times(record, waits)
    assert set(found.steps_ns) == {step_ns}
    assert (found.gap_ns, found.work) == (1000, 1.0)


@pytest.mark.parametrize("cost_ns", [0, MS // 4, MS])
def test_what_an_interruption_costs_is_told_from_the_steps_times(cost_ns: int) -> None:
    chance = random.Random(5)
    bubbles = []
    end_ns = 0
    for number in range(1, 3001):
        start_ns = end_ns + 20 * MS
        end_ns = start_ns + chance.randrange(MS // 4, 16 * MS)
        bubbles.append(Bubble(1, 0, BubbleKind.DRAIN, start_ns, end_ns, 0, number))
    core = Core(bubbles)
    core.now_ns = bubbles[0].start_ns
    lengths, steps = [], []
    while not core.over:
        lengths.append(chance.randrange(MS, 4 * MS))
        begin_ns = core.now_ns
        core.spend(lengths[-1], cost_ns)
        steps.append((begin_ns, core.now_ns))
    found = step_times(WorkerRecord("job", 0, len(steps), 1.0, 0, 0, 0.0, [], steps), bubbles)
    assert fmean(found.steps_ns) == pytest.approx(fmean(lengths), rel=0.02)
    assert found.resume_ns == pytest.approx(cost_ns, abs=MS // 10)


def test_the_steps_of_the_same_time_are_played() -> None:
    # Steps of 1 ms in the first 40 iterations and of 4 ms in the last 40.
    times = StepTimes((MS,) * 40 + (4 * MS,) * 40, iterations=tuple(range(1, 81)))
    done = replay(opened(even_bubbles(80, 10 * MS)), times)
    steps = {use.seq: use.steps for use in done.uses}
    assert (steps[5], steps[75]) == (10, 2)
    with pytest.raises(ValueError, match="2 iterations for 1 steps"):
        StepTimes((1,), iterations=(1, 2))

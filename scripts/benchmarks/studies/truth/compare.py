"""Comparison of real runs with the simulator's predictions: the figures of both, their errors, and the noise.

A run alternates short blocks with and without filling.  Its mean iteration time, its seconds of bubbles by kind, and
each job's harvested time and work in the blocks with filling are compared with three predictions:

* ``profile``: from the blocks without filling, and from steps of other blocks than the predicted ones.  This is the
  user's workflow: profile, then predict.
* ``halves``: every other block with filling, predicted from the blocks in between, and vice versa.
* ``same``: from the busy times of the predicted iterations themselves.  Only waits, predictions and filling are
  simulated, so this is the error of the simulator itself, without the machine's noise.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np

from megatron.fill.errors import FillError
from megatron.fill.pipeline.schedule import Schedule
from megatron.fill.rank.rule import FillRule
from megatron.fill.records import last_segment
from megatron.fill.types import BubbleKind, CycleKey, RankRecord, WorkerRecord
from megatron.fill.wings.sim.recorded.busy import RecordedMainJob
from megatron.fill.wings.sim.recorded.groups import read_pipeline
from scripts.benchmarks.studies.truth.replay import Opened, PlayedIteration, open_bubbles, replay
from scripts.benchmarks.studies.truth.steps import StepTimes, step_times

RUN = "run.json"  # the run's description in its folder
SMALL = 0.01  # share of the ranks' time below which a kind of bubbles is compared with the iteration, not with itself
NEIGHBOURS = 12  # recorded iterations from which one is drawn: near in time, since machines drift


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a training, per iteration.

    Attributes:
        measured: measured value in the blocks with filling.
        predicted: predicted value by method.
        error: error of each prediction, relative to ``measured``, or to the ranks' time in an iteration if ``small``.
        ci95: half the width of the 95% interval of ``measured``, relative to the same.
        halves: difference of odd and even blocks, relative to the same.
        noise: 1.96 standard errors of the mean difference between the blocks and their neighbours, relative to the
            same.
    """

    name: str
    unit: str
    measured: float
    predicted: dict[str, float]
    error: dict[str, float]
    ci95: float
    halves: float
    noise: float
    small: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """The records of a training.

    Attributes:
        window: iterations with filling that count: those after every job had begun to run.
    """

    schedule: Schedule
    rule: FillRule
    ranks: list[RankRecord]
    workers: list[WorkerRecord]
    window: list[int]
    block: dict[int, int]

    def half(self, odd: bool) -> set[int]:
        """Iterations of the window in every other pair of blocks."""
        return {number for number in self.window if self.block[number] // 2 % 2 == odd}


def load(folder: Path) -> Run:
    """Read a run's folder: the records, and the ``rule`` for filling in ``run.json``.

    Raises:
        FillError: a file is missing, a rank had no job or several, or too few blocks are left after all had begun.
    """
    try:
        said = json.loads((folder / RUN).read_text(encoding="utf-8"))
        rule = FillRule(**said["rule"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FillError(f"{folder / RUN}: does not say how it was filled: {type(error).__name__}: {error}") from error
    ranks, schedule = read_pipeline(folder)
    files = last_segment(folder).files()
    agents = [[worker for _, worker in files[record.info.rank].attempts()] for record in ranks]
    if any(len(workers) != 1 or not workers[0].steps_done for workers in agents):
        counts = [sum(worker.steps_done > 0 for worker in workers) for workers in agents]
        raise FillError(f"{folder}: {counts} jobs ran on the ranks; expected one on each")
    return select(schedule, rule, ranks, [workers[0] for workers in agents])


def select(schedule: Schedule, rule: FillRule, ranks: list[RankRecord], workers: list[WorkerRecord]) -> Run:
    """Select the part of a run that can be compared: from the first block after every job had begun, or, in a long run,
    after the first step that is still in the records.

    Raises:
        FillError: fewer than four blocks with filling are left.
    """
    begun = []
    for record, worker in zip(ranks, workers, strict=True):
        first = min(use.seq for use in worker.uses if not use.idle)
        known_ns = worker.steps[0][0] if worker.steps else 0
        begun.append(
            next(bubble.iteration for bubble in record.bubbles if bubble.seq >= first and bubble.end_ns > known_ns)
        )
    block = {item.iteration: item.block for item in ranks[0].iterations}
    window = [item.iteration for item in ranks[0].iterations if item.filling and item.block > block[max(begun)]]
    if len({block[number] for number in window}) < 4:
        raise FillError(f"the jobs began in iteration {max(begun)}; too few blocks with filling are left after that")
    return Run(schedule, rule, ranks, workers, window, block)


def measured(run: Run) -> dict[int, dict[str, float]]:
    """Return all figures per iteration of the window, in seconds or in the job's unit of work."""
    figures: dict[int, defaultdict[str, float]] = {number: defaultdict(float) for number in run.window}
    for record, worker in zip(run.ranks, run.workers, strict=True):
        for item in record.iterations:
            if item.iteration in figures:
                figures[item.iteration]["iteration"] += (item.end_ns - item.start_ns) / 1e9 / len(run.ranks)
        of_seq = {bubble.seq: bubble.iteration for bubble in record.bubbles if bubble.seq}
        for bubble in record.bubbles:
            if bubble.iteration in figures:
                figures[bubble.iteration][f"bubbles {bubble.kind}"] += bubble.duration_ns / 1e9
        work = worker.work_done / worker.steps_done
        for use in worker.uses:
            if of_seq[use.seq] in figures:
                figures[of_seq[use.seq]][f"harvest {worker.job}"] += use.harvested_ns / 1e9
                figures[of_seq[use.seq]][f"work {worker.job}"] += use.steps * work
    return {number: dict(values) for number, values in figures.items()}


class RunPredictor:
    """Predicts the figures of a run from samples of its iterations."""

    def __init__(self, run: Run, seed: int = 0) -> None:
        self.job = RecordedMainJob(run.ranks, run.schedule)
        self.samples = {sample.iteration: sample for sample in self.job.samples}
        self.run = replace(run, window=[number for number in run.window if number in self.samples])
        self.simulated = {number: self.job.simulate(sample) for number, sample in self.samples.items()}
        self.key = CycleKey(run.schedule.name, run.schedule.microbatches, run.schedule.chunks)
        self._random = random.Random(seed)

    def same(self) -> dict[str, float]:
        """Predict from the predicted iterations themselves."""
        chosen = set(self.run.window)
        drawn = {number: number for number in self.samples}
        return self._means(self._play(drawn, chosen), chosen)

    def profile(self) -> dict[str, float]:
        """Predict from the iterations without filling, with steps from the other half of the blocks."""
        pool = [number for number, sample in self.samples.items() if sample.block >= 0 and not sample.filling]
        drawn = self._draw(pool)
        return self._folded(dict.fromkeys((False, True), drawn))

    def halves(self) -> dict[str, float]:
        """Predict each half of the blocks with filling from the other half."""
        return self._folded(
            {odd: self._draw(sorted(self.run.half(not odd) & set(self.samples))) for odd in (False, True)}
        )

    def _folded(self, drawn: Mapping[bool, dict[int, int]]) -> dict[str, float]:
        figures: dict[int, dict[str, float]] = {}
        for odd in (False, True):
            played = self._play(drawn[odd], self.run.half(not odd))
            figures |= {number: played[number] for number in self.run.half(odd) if number in played}
        return self._means(figures, set(figures))

    def _draw(self, pool: Sequence[int]) -> dict[int, int]:
        """Draw, for each iteration of the run, one of the pool's iterations that are nearest in time."""
        drawn = {}
        for number in range(min(self.samples), max(self.samples) + 1):
            near = sorted(pool, key=lambda other: abs(other - number))[:NEIGHBOURS]
            drawn[number] = self._random.choice(near)
        return drawn

    def _play(self, drawn: Mapping[int, int], steps_from: set[int]) -> dict[int, dict[str, float]]:
        """Simulate the whole run with these iterations, and return all figures per iteration."""
        figures: dict[int, defaultdict[str, float]] = {}
        for number, source in drawn.items():
            figures[number] = defaultdict(float, iteration=self.simulated[source].iteration_ns / 1e9)
        filling = {item.iteration: item.filling for item in self.run.ranks[0].iterations}
        for rank, (record, worker) in enumerate(zip(self.run.ranks, self.run.workers, strict=True)):
            played = []
            start_ns = 0
            for number, source in drawn.items():
                simulated = self.simulated[source]
                played.append(PlayedIteration(number, start_ns, simulated.waits[rank], filling[number]))
                start_ns += simulated.period_ns
            opened = open_bubbles(played, self.key, self.run.rule)
            for bubble in opened.bubbles:
                figures[bubble.iteration][f"bubbles {bubble.kind}"] += bubble.duration_ns / 1e9
            self._fill(figures, opened, worker, step_times(worker, record.bubbles, steps_from))
        return {number: dict(values) for number, values in figures.items()}

    def _fill(
        self,
        figures: dict[int, defaultdict[str, float]],
        opened: Opened,
        worker: WorkerRecord,
        times: StepTimes,
    ) -> None:
        of_seq = {bubble.seq: bubble.iteration for bubble in opened.bubbles if bubble.seq}
        for use in replay(opened, times).uses:
            of = figures[of_seq[use.seq]]
            of[f"harvest {worker.job}"] += use.harvested_ns / 1e9
            of[f"work {worker.job}"] += use.steps * times.work

    @staticmethod
    def _means(figures: Mapping[int, Mapping[str, float]], chosen: set[int]) -> dict[str, float]:
        return means(figures[number] for number in chosen if number in figures)


def means(figures: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each figure; an iteration without it counts as 0."""
    rows = list(figures)
    return {name: fmean(row.get(name, 0.0) for row in rows) for name in sorted({name for row in rows for name in row})}


def compare(run: Run, repeats: int = 4) -> list[Figure]:
    """Return all figures of a run, measured and predicted.

    Args:
        repeats: number of draws of iterations; the predictions are means over them.
    """
    predictor = RunPredictor(run)
    run = predictor.run
    found = measured(run)
    whole = means(found.values())
    predictions = {
        "profile": means(predictor.profile() for _ in range(repeats)),
        "halves": means(predictor.halves() for _ in range(repeats)),
        "same": predictor.same(),
    }
    for values in (whole, *predictions.values(), *found.values()):
        for name in ("bubbles", "harvest"):
            values[name] = sum(value for part, value in values.items() if part.startswith(f"{name} "))
    odd, even = (means(found[number] for number in run.half(half)) for half in (True, False))
    figures = []
    for name in sorted(whole, key=_place):
        small = name.startswith("bubbles ") and whole[name] < SMALL * len(run.ranks) * whole["iteration"]
        of_blocks = _of_blocks(run, [found[number].get(name, 0.0) for number in run.window])
        scale = len(run.ranks) * whole["iteration"] if small else whole[name]
        figures.append(
            Figure(
                name=name,
                unit="per iteration" if name.startswith("work ") else "s per iteration",
                measured=whole[name],
                predicted={way: values.get(name, 0.0) for way, values in predictions.items()},
                error={way: (values.get(name, 0.0) - whole[name]) / scale for way, values in predictions.items()},
                ci95=_half_width(of_blocks) / scale,
                noise=_noise(of_blocks) / scale,
                halves=(odd.get(name, 0.0) - even.get(name, 0.0)) / scale,
                small=small,
            )
        )
    return figures


def _place(name: str) -> tuple[int, int, str]:
    first, _, rest = name.partition(" ")
    kinds = [str(kind) for kind in BubbleKind]
    order = ("iteration", "bubbles", "harvest", "work").index(first)
    return order, kinds.index(rest) if rest in kinds else -1, rest


def _of_blocks(run: Run, values: Sequence[float]) -> np.ndarray:
    """Means per block: neighbouring iterations are correlated, so blocks are drawn and compared instead."""
    blocks: defaultdict[int, list[float]] = defaultdict(list)
    for number, value in zip(run.window, values, strict=True):
        blocks[run.block[number]].append(value)
    return np.asarray([fmean(block) for block in blocks.values()])


def _half_width(of_blocks: np.ndarray) -> float:
    """Half the width of the 95% bootstrap interval of the mean."""
    generator = np.random.default_rng(0)
    drawn = of_blocks[generator.integers(len(of_blocks), size=(2000, len(of_blocks)))].mean(axis=1)
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(high - low) / 2


def _noise(of_blocks: np.ndarray) -> float:
    """1.96 standard errors of the mean difference between each block and the next."""
    return float(1.96 * np.diff(of_blocks).std(ddof=1) / np.sqrt(len(of_blocks)))

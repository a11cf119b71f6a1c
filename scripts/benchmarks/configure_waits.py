"""Waits by stage that others have measured: the errors of the configurator's timeline.

Of the folder it reads ``OPT-350_*_stage*_rank*.csv``: for each rank a row of Megatron's timers, of the trainings that
Sailor's authors made with Aceso on nodes of four GH200 (``sailor/Planner/baselines/Aceso/aceso_validation_clariden/
runtime/OPT-350/time/csv`` of <https://github.com/eth-easl/sailor>, at 16eebd41).  A name has nodes, samples of an
iteration, replicas, stages and samples of a micro-batch; four tensor-parallel ranks are a node.

Passes, reductions and steps are those of the file, in which each is timed between two synchronisations of the GPU; how
long each stage waits follows from the timeline.  It is compared three times, as transfers are

- *eager*: by their size, with nobody but the receiver waiting for them;
- *by size*: blocking, as the configurator has them, with one bandwidth for all;
- *by link*: blocking, with what a lone transfer takes on each link: an iteration ends with gradients that a stage sends
  while the one before it waits for nothing else.

The bandwidth is what Sailor's authors measured between two of these nodes (``sailor/providers/
network_coeffs_all_homo.json``).  An exchange takes one time more, for all trainings and stages: learned from the
training with the smallest micro-batches and most of them, which is apart as *taught*.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron.fill.errors import ConfigError
from megatron.fill.given.files import read_text
from megatron.fill.pipeline.costs import PipelineCosts, StageCost
from megatron.fill.wings.configure.latency import Iteration, timeline
from megatron.fill.wings.configure.overlap import exchanges_hold
from megatron.fill.wings.configure.peaks import laid_out
from megatron.fill.wings.mainjob.analytic import p2p_bytes
from megatron.fill.wings.mainjob.model import ModelSpec
from megatron.fill.wings.mainjob.parallel import Parallel

_NAME = re.compile(r"OPT-350_\d+-(\d+)-(\d+)-(\d+)-(\d+)_stage(\d+)_rank\d+\.csv")
_FLAGS = (
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --vocab-size 50257 --fp16 "
    "--transformer-impl local --tensor-model-parallel-size 4 --global-batch-size {} --pipeline-model-parallel-size {} "
    "--micro-batch-size {}"
)
_TENSOR = 4
_EXCHANGES = (
    "forward-recv",
    "forward-send",
    "forward-send-backward-recv",
    "backward-recv",
    "backward-send",
    "backward-send-forward-recv",
)
_FORWARD, _BACKWARD, _SENT = "forward-compute", "backward-compute", "backward-send"
_REDUCE, _EMBEDDING, _STEP = "backward-params-all-reduce", "backward-embedding-all-reduce", "optimizer"
BANDWIDTH = 22_934_533_176.5  # bytes a second
_MORE_MS = 1.1  # of an exchange
_TAUGHT = (64, 1, 4, 1)

type Case = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Waiting:
    """A training whose waits were timed.

    Attributes:
        case: samples of an iteration, replicas, stages and samples of a micro-batch.
        stages: each stage's timers, the means of its ranks in ms.
    """

    case: Case
    stages: tuple[Mapping[str, float], ...]

    @property
    def flags(self) -> list[str]:
        """Megatron's."""
        samples, _, stages, microbatch = self.case
        return _FLAGS.format(samples, stages, microbatch).split()

    @property
    def parallel(self) -> Parallel:
        return self._laid_out()[1]

    @property
    def iteration_ms(self) -> float:
        return self.stages[0]["time"]

    @property
    def idle(self) -> list[float]:
        """What each stage waits, as a share of the iteration.

        Ranks wait for each other in the embedding's reduction and in the optimizer, too: beyond what it takes the
        quickest one.
        """
        return [
            (sum(its[name] for name in (*_EXCHANGES, _EMBEDDING, _STEP)) - self._embedding_ms(stage) - self._step_ms)
            / self.iteration_ms
            for stage, its in enumerate(self.stages)
        ]

    def by_size_ms(self) -> list[float]:
        """What a transfer to the next stage takes by its size, or one back; one per stage."""
        return [p2p_bytes(*self._laid_out()) / BANDWIDTH * 1e3] * len(self.stages)

    def by_link_ms(self) -> list[float]:
        """The same by what lone ones took on average: as many gradients as there are stages from a stage to the end."""
        its = self.parallel
        lone = [self.stages[to][_SENT] / min(its.microbatches, its.pp - to) for to in range(1, its.pp)]
        return [*lone, 0.0]

    def predicted(self, transfers_ms: Sequence[float], blocking: bool) -> tuple[list[float], float]:
        """What each stage is predicted to wait, and the iteration, as shares of the one that was measured.

        Args:
            transfers_ms: as ``by_size_ms`` returns them.
            blocking: senders wait, too.
        """
        parallel, stages = self.parallel, range(len(self.stages))
        passes = [
            StageCost(*(_ns(its[name] / parallel.microbatches) for name in (_FORWARD, _BACKWARD)))
            for its in self.stages
        ]
        costs = PipelineCosts(tuple(passes), 0, (0,) * len(stages), (_ns(self._step_ms),) * len(stages))
        links = tuple((_ns(its_ms), _ns(its_ms)) for its_ms in transfers_ms)
        reduce_ns = tuple(_ns(self.stages[stage][_REDUCE] + self._embedding_ms(stage)) for stage in stages)
        found = timeline(Iteration(parallel, costs, (links,), reduce_ns, blocking))
        whole_ns = self.iteration_ms * 1e6
        return [sum(wait.duration_ns for wait in row) / whole_ns for row in found.waits], found.period_ns / whole_ns

    @property
    def _step_ms(self) -> float:
        return min(its[_STEP] for its in self.stages)

    def _embedding_ms(self, stage: int) -> float:
        """The reduction of the tied embedding's gradients, on the stages that have it."""
        ends = 0, len(self.stages) - 1
        return min(self.stages[end][_EMBEDDING] for end in ends) if stage in ends else 0.0

    def _laid_out(self) -> tuple[ModelSpec, Parallel]:
        _, replicas, stages, _ = self.case
        return laid_out(self.flags, replicas * stages * _TENSOR)


def read_waits(folder: Path, least_stages: int = 2) -> list[Waiting]:
    """Read the trainings of so many stages or more; none if the files are not there.

    Raises:
        ConfigError: a stage's files are missing, or one has no number where it should.
    """
    rows: dict[Case, dict[int, list[dict[str, float]]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(folder.glob("OPT-350_*.csv")):
        if (found := _NAME.fullmatch(path.name)) is None:
            continue
        samples, replicas, stages, microbatch, stage = map(int, found.groups())
        if stages >= least_stages:
            (row,) = csv.DictReader(read_text(path, "a rank's timers").splitlines())
            rows[samples, replicas, stages, microbatch][stage].append({name: float(row[name]) for name in row})
    found_all = []
    for case, its in sorted(rows.items()):
        if sorted(its) != list(range(case[2])):
            raise ConfigError(f"{folder}: stages {sorted(its)} of {case}: expected {case[2]}")
        found_all.append(Waiting(case, tuple(_means(its[stage]) for stage in range(case[2]))))
    return found_all


def _means(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each timer; one that a rank does not have is 0."""
    means: dict[str, float] = defaultdict(float)
    means |= {name: fmean(rank[name] for rank in ranks) for name in ranks[0]}
    return means


def measure_waits(folder: Path) -> dict[str, Any]:
    """The figures of the trainings that nothing was learned from, and the rows of all.

    Raises:
        ConfigError: as ``read_waits``, or no file is there.
    """
    trainings = read_waits(folder)
    if not trainings:
        raise ConfigError(f"{folder}: expected OPT-350_*_stage*_rank*.csv of trainings with several stages")
    rows = [_row(one) for one in trainings]
    judged = [row for row in rows if not row["taught"]]
    figures: dict[str, Any] = {"trainings": len(judged), "stages": sum(len(row["idle"]) for row in judged)}
    for name in ("eager", "by_size", "by_link"):
        off = [one - its for row in judged for one, its in zip(row[name], row["idle"], strict=True)]
        figures[name] = {
            "mean": fmean(map(abs, off)),
            "lowest": min(off),
            "highest": max(off),
            "iteration_mean": fmean(abs(row[f"{name}_iteration"] - 1) for row in judged),
        }
    return figures | {"rows": rows}


def _row(one: Waiting) -> dict[str, Any]:
    samples, replicas, stages, microbatch = one.case
    row: dict[str, Any] = {
        "case": f"{samples} samples, dp {replicas}, pp {stages}, micro-batch {microbatch}",
        "taught": one.case == _TAUGHT,
        "iteration_s": one.iteration_ms / 1e3,
        "idle": one.idle,
    }
    held = exchanges_hold(one.parallel, measured=False)
    for name, transfers_ms, more_ms, blocking in (
        ("eager", one.by_size_ms(), 0.0, False),
        ("by_size", one.by_size_ms(), _MORE_MS, held),
        ("by_link", one.by_link_ms(), _MORE_MS, held),
    ):
        row[name], row[f"{name}_iteration"] = one.predicted([its_ms + more_ms for its_ms in transfers_ms], blocking)
    return row


def _ns(milliseconds: float) -> int:
    return round(milliseconds * 1e6)

"""Iterations that others have measured on GPUs, and published: how well the configurator predicts and ranks them.

The file is vTrain's ``data/ground_truth_single.csv`` (https://github.com/VIA-Research/vTrain): 1,440 trainings with
Megatron-DeepSpeed on one node of up to eight A100, all with full recomputation.  It is read where it is.

As Pipette does, a few trainings serve as the profile of passes: of each hidden size, tensor parallelism and micro-batch
size the first few rows (``PROFILED``).  From them follow, by least squares without negative figures, what a layer takes
in each of these cases, and a few figures that all share: the output layer, the optimizer, the links.  All other rows
are predicted by the configurator's own model: ``latency.iteration`` and the timeline.

*Regret* is by how much the layout that is predicted to be the fastest is slower than the fastest, among the rows with
one model, batch and number of GPUs.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from megatron.fill.errors import ConfigError
from megatron.fill.given.files import read_text
from megatron.fill.wings.configure.latency import iteration, timeline
from megatron.fill.wings.configure.layout import lay_out
from megatron.fill.wings.configure.links import Links
from megatron.fill.wings.configure.passes import Both, Passes, Profile
from megatron.fill.wings.mainjob.analytic import p2p_bytes
from megatron.fill.wings.mainjob.hardware import GPUS
from megatron.fill.wings.mainjob.memory import stage_parameters
from megatron.fill.wings.mainjob.model import ModelSpec
from megatron.fill.wings.mainjob.parallel import Parallel, Precision, Recompute

COLUMNS = {
    "# GPUs": "gpus",
    "global batch": "global_batch",
    "micro batch": "microbatch",
    "hidden size": "hidden",
    "attention heads": "heads",
    "# layers": "layers",
    "sequence length": "sequence",
    "tensor parallelism": "tp",
    "data parallelism": "dp",
    "pipeline parallelism": "pp",
}
TIME = "iteration time (ms)"
PROFILED = 4  # rows of each hidden size, tensor parallelism and micro-batch size
_VOCABULARY = 51200  # GPT-2's, padded
_SHARED = ("output", "pass", "optimizer", "iteration", "reduce", "reduce bytes", "transfer", "transfer bytes")
_ROUNDS = 20  # of reweighting, so that a few rows that are far off do not count too much

type Case = tuple[int, int, int]  # hidden size, tensor parallelism, micro-batch size


@dataclass(frozen=True, slots=True)
class Row:
    """One training that was measured."""

    model: ModelSpec
    parallel: Parallel
    measured_s: float

    @property
    def case(self) -> Case:
        return self.model.hidden, self.parallel.tp, self.parallel.microbatch


def read_rows(path: Path) -> list[Row]:
    """The file's.

    Raises:
        ConfigError: naming the file, the line, the column, and what was expected.
    """
    expected = "vTrain's ground_truth_single.csv"
    lines = list(csv.DictReader(read_text(path, expected).removeprefix("\ufeff").splitlines()))
    if not lines:
        raise ConfigError(f"{path}: has no rows; expected {expected}")
    for name in (*COLUMNS, TIME):
        if name not in lines[0]:
            raise ConfigError(f"{path}: has no column {name!r}; expected {expected}")
    return [_row(path, number, line) for number, line in enumerate(lines, 2)]


def _row(path: Path, number: int, line: dict[str, str]) -> Row:
    its: dict[str, Any] = {}
    for name, field in COLUMNS.items():
        text = line[name] or ""
        if not (text.isdecimal() and int(text) > 0):
            raise ConfigError(f"{path}, line {number}: {name} is {text!r:.40}; expected a whole number above 0")
        its[field] = int(text)
    try:
        measured_s = float(line[TIME]) / 1e3
        if not 0 < measured_s < 1e6:
            raise ValueError
    except (TypeError, ValueError):
        raise ConfigError(f"{path}, line {number}: {TIME} is {line[TIME]!r:.40}; expected milliseconds") from None
    try:
        shape = {name: its[name] for name in ("layers", "hidden", "heads", "sequence")}
        model = ModelSpec(**shape, vocabulary=_VOCABULARY)
        sizes = {name: its[name] for name in ("tp", "pp", "dp", "microbatch", "global_batch")}
        parallel = Parallel(**sizes, precision=Precision.FP16, recompute=Recompute.FULL)
        parallel.check(model)
    except ValueError as error:
        raise ConfigError(f"{path}, line {number}: {error}") from error
    if parallel.gpus != its["gpus"]:
        raise ConfigError(f"{path}, line {number}: # GPUs is {its['gpus']}; expected tp * dp * pp, {parallel.gpus}")
    return Row(model, parallel, measured_s)


class Fit:
    """What profiled rows say of layers and links; times in seconds.

    Raises:
        ValueError: a case has no profiled row.
    """

    def __init__(self, profiled: Sequence[Row]) -> None:
        self._cases = sorted({row.case for row in profiled})
        rows = np.array([self._features(row) for row in profiled]) / [[row.measured_s] for row in profiled]
        scale = rows.max(axis=0)
        scale[scale == 0] = 1.0
        weights = np.ones(len(rows))
        for _ in range(_ROUNDS):
            found = least_squares(rows / scale * weights[:, None], weights)
            weights = (np.abs(rows / scale @ found - 1) + 0.01) ** -0.5
        found = found / scale
        self._layers = dict(zip(self._cases, found.tolist(), strict=False))
        self.shared = dict(zip(_SHARED, found[len(self._cases) :].tolist(), strict=True))

    def _features(self, row: Row) -> list[float]:
        """What each figure counts in an iteration: Pipette's closed form, for stages that are alike."""
        its, model = row.parallel, row.model
        m, pp, dp = its.microbatches, its.pp, its.dp
        layers = [0.0] * len(self._cases)
        layers[self._cases.index(row.case)] = (m + pp - 1) * model.layers / pp
        parameters = stage_parameters(model, its, 0)
        crossings = 2 * (pp - 1) * ((m - 1) // pp + 1)
        return [
            *layers,
            m * model.output_flops(its.microbatch) / its.tp,
            m,
            parameters,
            1.0,
            float(dp > 1),
            parameters * its.precision.gradient_bytes * 2 * (dp - 1) / dp,
            crossings,
            crossings * p2p_bytes(model, its),
        ]

    def predicted_s(self, row: Row) -> float:
        """By the timeline."""
        if row.case not in self._layers:
            raise ValueError(f"no row with (hidden, tp, micro-batch) {row.case} was profiled")
        its, model, shared = row.parallel, row.model, self.shared
        # a forward pass, computing it again, and a backward pass of twice its operations
        forward_ns = self._layers[row.case] * 1e9 / 4
        output_ns = (shared["output"] * model.output_flops(its.microbatch) / its.tp + shared["pass"]) * 1e9
        profile = Profile(
            its.tp,
            its.microbatch,
            Both(forward_ns, 2 * forward_ns),
            Both(0.0, 0.0),
            Both(output_ns / 3, output_ns * 2 / 3),
            shared["optimizer"],
        )
        reduce, transfer = (1 / max(shared[f"{name} bytes"], 1e-15) for name in ("reduce", "transfer"))
        stages = its.tp * its.dp
        rows = [
            [reduce if one // stages == other // stages else transfer for other in range(its.gpus)]
            for one in range(its.gpus)
        ]
        latency = [
            [0.0 if one // stages == other // stages else shared["transfer"] for other in range(its.gpus)]
            for one in range(its.gpus)
        ]
        layout = lay_out(Links(rows, latency, (0,) * its.gpus), its, range(its.gpus))
        line = timeline(iteration(model, GPUS["a100-40gb"], 1.0, its, layout, Passes([profile])))
        return line.period_ns / 1e9 + shared["iteration"] + (shared["reduce"] if its.dp > 1 else 0.0)


def least_squares(rows: np.ndarray, values: np.ndarray, rounds: int = 2000) -> np.ndarray:
    """The figures, none negative, with which rows times figures are nearest to values; one figure at a time."""
    square, target = rows.T @ rows, rows.T @ values
    found = np.zeros(len(target))
    for _ in range(rounds):
        before = found.copy()
        for at in range(len(found)):
            if square[at, at] > 0:
                found[at] = max(0.0, found[at] + (target[at] - square[at] @ found) / square[at, at])
        if np.abs(found - before).max() < 1e-12 * np.abs(found).max():
            break
    return found


def measure_vtrain(path: Path) -> dict[str, Any]:
    """Predict all rows that do not serve as the profile.

    Raises:
        ConfigError: the file is another one.
    """
    rows = read_rows(path)
    of_case: defaultdict[Case, list[Row]] = defaultdict(list)
    for row in rows:
        of_case[row.case].append(row)
    profiled = [row for its in of_case.values() for row in its[:PROFILED]]
    judged = [row for its in of_case.values() for row in its[PROFILED:]]
    if not judged:
        raise ConfigError(f"{path}: has {len(rows)} rows; expected more than {PROFILED} of each kind of pass")
    fit = Fit(profiled)
    groups: defaultdict[Any, list[tuple[float, float]]] = defaultdict(list)
    errors = []
    for row in judged:
        predicted_s = fit.predicted_s(row)
        errors.append(abs(predicted_s / row.measured_s - 1))
        groups[row.model, row.parallel.gpus, row.parallel.global_batch].append((predicted_s, row.measured_s))
    regrets = [
        min(group)[1] / min(measured for _, measured in group) - 1 for group in groups.values() if len(group) > 1
    ]
    return {
        "vtrain_mean": fmean(errors),
        "vtrain_worst": max(errors),
        "vtrain_regret": fmean(regrets),
        "vtrain_worst_regret": max(regrets),
        "vtrain_rows": len(judged),
        "vtrain_profiled": len(profiled),
        "vtrain_groups": len(regrets),
    }

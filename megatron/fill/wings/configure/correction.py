"""Correction of estimated memory, learned from measured peaks (Pipette, arXiv 2405.18093: its neural memory estimator).

A small network learns by which factor a GPU's peak differs from the account of ``room.memory``, from the training's
shape and layout.  It never leaves the range of factors that it has learned from, so that a layout unlike all others is
not misjudged by more than they were.  numpy is all it takes, for learning too.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from typing import Any

import numpy as np

from megatron.fill.errors import ConfigError
from megatron.fill.given.files import read_json
from megatron.fill.given.problems import shown
from megatron.fill.wings.configure.room import memory
from megatron.fill.wings.mainjob.memory import StageMemory
from megatron.fill.wings.mainjob.model import ModelSpec
from megatron.fill.wings.mainjob.parallel import Parallel, Precision, Recompute

_EXPECTED = "a file that pipefill memory-model has written"
_HIDDEN = 16
_STEPS = 3000
_RATE = 0.01
_DECAY = 1e-3

Array = np.ndarray[Any, np.dtype[np.float64]]


def features(model: ModelSpec, its: Parallel, stage: int) -> dict[str, float]:
    """Features that the factor is learned from: sizes by their logarithms, choices as 0 or 1."""
    sizes = {
        **{"gpus": its.gpus, "layers": model.layers, "hidden": model.hidden, "heads": model.heads},
        **{"groups": model.groups, "ffn": model.ffn, "sequence": model.sequence, "vocabulary": model.vocabulary + 1},
        **{"experts": model.experts + 1, "experts_per_token": model.experts_per_token, "tp": its.tp, "pp": its.pp},
        **{"dp": its.dp, "cp": its.cp, "ep": its.ep, "chunks": its.chunks, "microbatch": its.microbatch},
        **{"microbatches": its.microbatches, "global_batch": its.global_batch},
        "stage_layers": sum(its.layers(model)[stage :: its.pp]),
        "in_flight": min(its.pp - stage, its.microbatches),
    }
    choices = {
        **{"swiglu": model.swiglu, "tied_embeddings": model.tied_embeddings, "positions": model.positions > 0},
        **{"hidden_dropout": model.hidden_dropout, "attention_dropout": model.attention_dropout},
        **{"sequence_parallel": its.sequence_parallel, "distributed_optimizer": its.distributed_optimizer},
        **{"selective": its.recompute is Recompute.SELECTIVE, "full": its.recompute is Recompute.FULL},
        **{"fp16": its.precision is Precision.FP16, "fp32": its.precision is Precision.FP32},
        **{"first": stage == 0, "last": stage == its.pp - 1},
        "uneven": any(one is not None for one in (its.first_layers, its.last_layers, its.stage_layers)),
    }
    held = memory(model, its)[stage]
    parts = {"analytic": log(held.total_bytes), "activations": held.activations_bytes / held.total_bytes}
    return {name: log(size) for name, size in sizes.items()} | {k: float(v) for k, v in choices.items()} | parts


@dataclass(frozen=True, slots=True)
class Network:
    """Two hidden layers with tanh, between standardised numbers."""

    mean: Array  # mean of each feature; ``scale`` its standard deviation
    scale: Array
    weights: tuple[Array, ...]  # matrix of each layer, ``[in, out]``; ``biases`` ``[out]``
    biases: tuple[Array, ...]

    def __call__(self, rows: Array) -> Array:
        """For each row of features one number."""
        return _layers((rows - self.mean) / self.scale, self.weights, self.biases)[-1][:, 0]

    @classmethod
    def fit(cls, rows: Array, wanted: Array, seed: int = 0) -> Network:
        """Full-batch least squares by Adam: ``rows`` are ``[samples, features]``, ``wanted`` ``[samples]``."""
        mean, scale = rows.mean(0), rows.std(0)
        scale[scale == 0] = 1.0
        given = (rows - mean) / scale
        centre, spread = wanted.mean(), wanted.std() or 1.0
        source = np.random.default_rng(seed)
        widths = (given.shape[1], _HIDDEN, _HIDDEN, 1)
        shapes = list(itertools.pairwise(widths))
        numbers = [source.normal(0, ins**-0.5, (ins, outs)) for ins, outs in shapes]
        numbers += [np.zeros(outs) for _, outs in shapes]
        _descend(numbers, given, (wanted - centre) / spread, len(shapes))
        weights, biases = numbers[: len(shapes)], numbers[len(shapes) :]
        weights[-1] = weights[-1] * spread
        biases[-1] = biases[-1] * spread + centre
        return cls(mean, scale, tuple(weights), tuple(biases))


def _layers(given: Array, weights: Sequence[Array], biases: Sequence[Array]) -> list[Array]:
    """The outputs of all layers, their input first."""
    found = [given]
    for at, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        out = found[-1] @ weight + bias
        found.append(out if at == len(weights) - 1 else np.tanh(out))
    return found


def _descend(numbers: list[Array], given: Array, wanted: Array, layers: int) -> None:
    """Change weights and biases in place until they fit."""
    first = [np.zeros_like(one) for one in numbers]
    second = [np.zeros_like(one) for one in numbers]
    for step in range(1, _STEPS + 1):
        outs = _layers(given, numbers[:layers], numbers[layers:])
        error = (outs[-1] - wanted[:, None]) / len(wanted)
        slopes: list[Array] = [np.empty(0)] * len(numbers)
        for at in reversed(range(layers)):
            slopes[at] = outs[at].T @ error + _DECAY * numbers[at]
            slopes[layers + at] = error.sum(0)
            error = (error @ numbers[at].T) * (1 - outs[at] ** 2)
        for at, slope in enumerate(slopes):
            first[at] = 0.9 * first[at] + 0.1 * slope
            second[at] = 0.999 * second[at] + 0.001 * slope**2
            move = first[at] / (1 - 0.9**step) / (np.sqrt(second[at] / (1 - 0.999**step)) + 1e-8)
            numbers[at] -= _RATE * move


@dataclass(frozen=True, slots=True)
class Errors:
    """Errors on held-out samples, ``|predicted / measured - 1|``: without and with the correction."""

    samples: int
    analytic_mean: float
    analytic_worst: float
    corrected_mean: float
    corrected_worst: float


@dataclass(frozen=True, slots=True)
class Correction:
    """A learned factor on what a GPU holds."""

    network: Network
    least: float  # the smallest factor that was learned from; ``most`` the largest
    most: float
    margin: float  # addition to each factor: the most by which a held-out peak exceeded what was predicted
    samples: int  # number of samples learned from

    def factor(self, model: ModelSpec, its: Parallel, stage: int) -> float:
        """Factor for a stage's GPUs, without the margin."""
        row = np.array([list(features(model, its, stage).values())])
        return float(np.exp(np.clip(self.network(row)[0], log(self.least), log(self.most))))

    @property
    def least_factor(self) -> float:
        """No factor is smaller, margin included."""
        return self.least * (1 + self.margin)

    def corrected(self, model: ModelSpec, its: Parallel, held: Sequence[StageMemory]) -> tuple[StageMemory, ...]:
        """Corrected memory of each stage's GPUs, margin included; the difference is among ``activations_bytes``."""
        found = []
        for stage, one in enumerate(held):
            more = one.total_bytes * (self.factor(model, its, stage) * (1 + self.margin) - 1)
            found.append(replace(one, activations_bytes=one.activations_bytes + round(more)))
        return tuple(found)

    def save(self, path: Path) -> None:
        """Write it as JSON; OSError if it cannot be written."""
        from megatron.fill.linux.files import write_text

        content = {name: getattr(self, name) for name in ("least", "most", "margin", "samples")}
        content |= {"features": _names(), "mean": self.network.mean.tolist(), "scale": self.network.scale.tolist()}
        pairs = zip(self.network.weights, self.network.biases, strict=True)
        content["layers"] = [{"weights": weight.tolist(), "biases": bias.tolist()} for weight, bias in pairs]
        write_text(path, json.dumps(content) + "\n")

    @classmethod
    def load(cls, path: Path) -> Correction:
        """Read it; ConfigError naming the file, the field and what was expected."""
        found = read_json(path, _EXPECTED)
        if not isinstance(found, dict):
            raise ConfigError(f"{path}: found {shown(found)}; expected {_EXPECTED}")
        for name in ("features", "mean", "scale", "layers", "least", "most", "margin", "samples"):
            if name not in found:
                raise ConfigError(f"{path}: {name} is missing; expected {_EXPECTED}")
        if found["features"] != _names():
            raise ConfigError(f"{path}: features are not those of this version; expected {_EXPECTED}, anew")
        count = len(found["features"])
        mean, scale = (_array(path, name, found[name], (count,)) for name in ("mean", "scale"))
        if not isinstance(found["layers"], list) or not found["layers"]:
            raise ConfigError(f"{path}: layers is {shown(found['layers'])}; expected a list of layers")
        weights, biases = [], []
        for at, layer in enumerate(found["layers"]):
            last = at == len(found["layers"]) - 1
            its = layer if isinstance(layer, dict) else {}
            biases.append(_array(path, f"layers[{at}].biases", its.get("biases"), (1,) if last else (None,)))
            weights.append(_array(path, f"layers[{at}].weights", its.get("weights"), (count, len(biases[-1]))))
            count = len(biases[-1])
        least, most, samples = (_positive(path, name, found[name]) for name in ("least", "most", "samples"))
        margin = _positive(path, "margin", found["margin"], or_zero=True)
        if least > most or not (scale > 0).all():
            raise ConfigError(f"{path}: least or scale is out of range; expected {_EXPECTED}")
        return cls(Network(mean, scale, tuple(weights), tuple(biases)), least, most, margin, int(samples))


def _names() -> list[str]:
    example = ModelSpec(layers=1, hidden=1, heads=1, sequence=1, vocabulary=1)
    return list(features(example, Parallel(pp=1, global_batch=1), 0))


def _array(path: Path, name: str, value: Any, shape: tuple[int | None, ...]) -> Array:
    try:
        found = np.array(value, dtype=np.float64)
    except (TypeError, ValueError):
        found = np.array(np.nan)
    fits = found.ndim == len(shape) and all(want in (None, have) for want, have in zip(shape, found.shape, strict=True))
    if not fits or not np.isfinite(found).all():
        sides = " x ".join("any" if side is None else str(side) for side in shape)
        raise ConfigError(f"{path}: {name} is {shown(value)}; expected {sides} finite numbers")
    return found


def _positive(path: Path, name: str, value: Any, or_zero: bool = False) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < 1e6 or (value == 0 and not or_zero):
        raise ConfigError(f"{path}: {name} is {shown(value)}; expected a number {'from' if or_zero else 'above'} 0")
    return float(value)

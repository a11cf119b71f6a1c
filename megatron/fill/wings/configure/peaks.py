"""Measured peaks of trainings, and what is learned from them.  docs/configure.md explains the file."""

from __future__ import annotations

import random
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path
from typing import Any

import numpy as np

from megatron.fill.errors import ConfigError
from megatron.fill.given.files import read_json
from megatron.fill.given.problems import shown
from megatron.fill.wings.configure.correction import Correction, Errors, Network, features
from megatron.fill.wings.configure.flags import read_flags
from megatron.fill.wings.configure.room import memory
from megatron.fill.wings.configure.space import padded
from megatron.fill.wings.mainjob.model import ModelSpec
from megatron.fill.wings.mainjob.parallel import Parallel, Recompute

LEAST_SAMPLES = 20
_HELD_OUT = 5  # every so manieth
_MOST_FACTOR = 10  # between a peak and the accounting; beyond, its unit must be another one
_EXPECTED = 'a JSON file with a list "peaks" of flags, gpus, stage and peak_bytes'


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that a GPU of one stage held."""

    model: ModelSpec
    parallel: Parallel
    stage: int
    peak_bytes: int

    @property
    def analytic_bytes(self) -> int:
        """Peak by the accounting, in bytes."""
        return memory(self.model, self.parallel)[self.stage].total_bytes


def load_peaks(path: Path) -> list[Peak]:
    """Read the file; ConfigError naming it, the entry, its field, its value and what was expected."""
    found = read_json(path, _EXPECTED)
    entries = found.get("peaks") if isinstance(found, dict) else None
    if not isinstance(entries, list):
        raise ConfigError(f"{path}: found {shown(found)}; expected {_EXPECTED}")
    if len(entries) < LEAST_SAMPLES:
        raise ConfigError(f"{path}: peaks has {len(entries)} entries; expected at least {LEAST_SAMPLES} to learn from")
    peaks = [_peak(f"{path}: peaks[{at}]", entry) for at, entry in enumerate(entries)]
    different = len({_place(one) for one in peaks})
    if different < LEAST_SAMPLES:
        raise ConfigError(
            f"{path}: peaks has {different} different trainings and stages; expected at least {LEAST_SAMPLES}"
        )
    return peaks


def _peak(where: str, entry: object) -> Peak:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} is {shown(entry)}; expected a mapping")
    flags = entry.get("flags")
    if not isinstance(flags, str):
        raise ConfigError(f"{where}.flags is {shown(flags)}; expected Megatron's flags as text")
    numbers = {}
    for name, least in (("gpus", 1), ("stage", 0), ("peak_bytes", 1)):
        value = entry.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 1 << 62:
            raise ConfigError(f"{where}.{name} is {shown(value)}; expected a whole number from {least}")
        numbers[name] = value
    try:
        model, its = laid_out(shlex.split(flags), numbers["gpus"])
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from error
    if numbers["stage"] >= its.pp:
        raise ConfigError(f"{where}.stage is {numbers['stage']}; expected less than the {its.pp} stages")
    peak = Peak(model, its, numbers["stage"], numbers["peak_bytes"])
    held = peak.analytic_bytes
    if not 1 / _MOST_FACTOR <= peak.peak_bytes / held <= _MOST_FACTOR:
        raise ConfigError(
            f"{where}.peak_bytes is {peak.peak_bytes}; expected bytes, of which the accounting has {held}"
        )
    return peak


def laid_out(flags: Sequence[str], gpus: int) -> tuple[ModelSpec, Parallel]:
    """The model and the layout of a training whose flags say all of it; what they leave out is 1, as in Megatron.

    Raises:
        ConfigError: naming the flag, its value, and what was expected.
    """
    training = read_flags(flags, ran=True)
    fixed: dict[str, Any] = {"recompute": Recompute.NONE} | dict(training.fixed)
    tp, pp, cp = (fixed.get(name, 1) for name in ("tp", "pp", "cp"))
    if gpus % (tp * pp * cp):
        raise ConfigError(f"gpus is {gpus}: expected a multiple of the {tp * pp * cp} that one replica has")
    try:
        its = Parallel(
            **{**fixed, "tp": tp, "pp": pp, "cp": cp},
            dp=gpus // (tp * pp * cp),
            global_batch=training.global_batch,
            precision=training.precision,
            schedule="interleaved" if fixed.get("chunks", 1) > 1 else "1f1b",
        )
        model = padded(training, tp)
        its.check(model)
    except ValueError as error:
        raise ConfigError(f"the flags describe no layout: {error}") from error
    return model, its


def learn(peaks: Sequence[Peak], seed: int = 0) -> tuple[Correction, Errors]:
    """A correction from four fifths of the peaks, and its errors on the others; its margin is from these.

    Args:
        seed: seed of the held-out choice and of the network's first weights.
    """
    order = list(dict.fromkeys(map(_place, peaks)))  # peaks of one are taught or held out together
    random.Random(seed).shuffle(order)
    places = set(order[::_HELD_OUT])
    held_out = [one for one in peaks if _place(one) in places]
    taught = [one for one in peaks if _place(one) not in places]
    found = fitted(taught, seed)
    errors = errors_on(found, held_out)
    over = max(one.peak_bytes / (_corrected(found, one)) - 1 for one in held_out)
    return Correction(found.network, found.least, found.most, max(0.0, over), found.samples), errors


def _place(one: Peak) -> tuple[ModelSpec, Parallel, int]:
    """Return what a factor is learned for."""
    return one.model, one.parallel, one.stage


def fitted(peaks: Sequence[Peak], seed: int = 0) -> Correction:
    """A correction from all of them, without a margin."""
    rows = np.array([list(features(one.model, one.parallel, one.stage).values()) for one in peaks])
    wanted = np.log([one.peak_bytes / one.analytic_bytes for one in peaks])
    network = Network.fit(rows, wanted, seed)
    return Correction(network, exp(wanted.min()), exp(wanted.max()), 0.0, len(peaks))


def _corrected(correction: Correction, one: Peak) -> float:
    return one.analytic_bytes * correction.factor(one.model, one.parallel, one.stage)


def errors_on(correction: Correction, peaks: Sequence[Peak]) -> Errors:
    """Errors on peaks that it has not seen."""
    analytic = [abs(one.analytic_bytes / one.peak_bytes - 1) for one in peaks]
    corrected = [abs(_corrected(correction, one) / one.peak_bytes - 1) for one in peaks]
    count = len(peaks)
    return Errors(count, sum(analytic) / count, max(analytic), sum(corrected) / count, max(corrected))

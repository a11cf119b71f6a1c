"""Sources of a sampler's randomness: a generator, or the enumeration of all outcomes with their probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np


class Chance(Protocol):
    """A sampler's only source of randomness, so that all its outcomes can be enumerated."""

    def happens(self, probability: float) -> bool:
        """Return True with this probability; above 1 counts as 1."""

    def draw(self, weights: np.ndarray) -> int:
        """An index, drawn with these weights: none below 0, and not all 0."""


class Sampled:
    """Chance from a random generator."""

    def __init__(self, generator: np.random.Generator) -> None:
        self._generator = generator

    def happens(self, probability: float) -> bool:
        return bool(self._generator.random() < probability)

    def draw(self, weights: np.ndarray) -> int:
        cumulative = np.cumsum(weights, dtype=np.float64)
        at = int(np.searchsorted(cumulative, self._generator.random() * cumulative[-1], side="right"))
        return min(at, int(np.flatnonzero(weights)[-1]))  # by rounding it may be beyond the last one


class _Scripted:
    """Chance that falls as a script says, and as the first option where the script ends."""

    def __init__(self, script: list[tuple[list[tuple[int, float]], int]]) -> None:
        self._script = script  # at each decision: (what, probability) of all options, and which one is next
        self._at = 0
        self.probability = 1.0

    def happens(self, probability: float) -> bool:
        share = min(1.0, max(0.0, probability))
        return bool(self._decide([(1, share), (0, 1.0 - share)]))

    def draw(self, weights: np.ndarray) -> int:
        total = float(np.sum(weights, dtype=np.float64))
        return self._decide([(index, float(weight) / total) for index, weight in enumerate(weights)])

    def _decide(self, options: list[tuple[int, float]]) -> int:
        if self._at == len(self._script):
            self._script.append(([option for option in options if option[1] > 0], 0))
        possible, which = self._script[self._at]
        self._at += 1
        what, share = possible[which]
        self.probability *= share
        return what


def outcomes[T](experiment: Callable[[Chance], T]) -> Iterator[tuple[float, T]]:
    """Every outcome of an experiment with its probability: it is run once for each way that its chances can fall."""
    script: list[tuple[list[tuple[int, float]], int]] = []
    while True:
        chance = _Scripted(script)
        result = experiment(chance)
        yield chance.probability, result
        while script and script[-1][1] + 1 == len(script[-1][0]):
            script.pop()
        if not script:
            return
        options, which = script.pop()
        script.append((options, which + 1))

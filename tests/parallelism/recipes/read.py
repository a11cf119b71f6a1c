"""The training recipes of a Megatron-LM checkout: those of its functional tests that have a pipeline.

Read are `tests/functional_tests/test_cases/FAMILY/NAME/model_config.yaml`; nothing is written there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CASES = "tests/functional_tests/test_cases"
PIPELINE, IMPLEMENTATION = "--pipeline-model-parallel-size", "--transformer-impl"
# Run by Megatron's test script with one checkpoint: trained to the half, and from there to the end.
RESUMED = ("ckpt-resume", "frozen-resume")
FROZEN = ("frozen-resume", "frozen-start")  # from a checkpoint that NVIDIA does not publish
Value = str | bool


@dataclass(frozen=True, slots=True)
class Recipe:
    """One recipe.

    Attributes:
        family: gpt, moe, bert, ...; it says which script trains.
        kind: its TEST_TYPE, such as ``regular`` or ``ckpt-resume``.
        mode: ``pretraining``, ``inference`` or ``rl``.
        flags: Megatron's, with their values; True for one that is set without a value.
    """

    name: str
    family: str
    kind: str
    mode: str
    flags: Mapping[str, Value]

    @property
    def local(self) -> bool:
        """Whether its layers are Megatron's own, not those of Transformer Engine."""
        return self.flags.get(IMPLEMENTATION) == "local" or self.flags.get("--spec") == "local"


def read(checkout: Path) -> list[Recipe]:
    """The recipes with a pipeline: those with local layers first, then always one with the most flags not met before.

    Raises:
        ValueError: the folder has no recipes, or one cannot be read; the message has the file.
    """
    paths = sorted((checkout / CASES).glob("*/*/model_config.yaml"))
    if not paths:
        raise ValueError(f"{checkout}: no {CASES}/*/*/model_config.yaml; expected a checkout of Megatron-LM")
    return ordered(recipe for path in paths if (recipe := parse(path)) is not None)


def parse(path: Path) -> Recipe | None:
    """The recipe of a file; None if it has no pipeline.  Of several sets of flags the first with one counts.

    Raises:
        ValueError: it is no recipe.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        sets = [given or {} for name, given in content.items() if name.startswith("MODEL_ARGS")]
        for given in sets:
            if int(given.get(PIPELINE, 1)) > 1:
                flags = {name: _value(value) for name, value in given.items() if value is not False}
                return Recipe(
                    path.parent.name,
                    path.parent.parent.name,
                    str(content.get("TEST_TYPE", "regular")),
                    str(content.get("MODE", "pretraining")),
                    flags,
                )
    except (yaml.YAMLError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}; expected a recipe with MODEL_ARGS") from error
    return None


def _value(value: Any) -> Value:
    """As Megatron's test script passes it: a list in brackets, or several words, are several arguments."""
    if value is True:
        return True
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value).strip().removeprefix("[").removesuffix("]") if str(value).startswith("[") else str(value)


def ordered(recipes: Iterable[Recipe]) -> list[Recipe]:
    """Those with local layers first; then always the recipe that has the most flags which none before it has."""
    waiting = sorted(recipes, key=lambda recipe: (not recipe.local, recipe.name))
    done: list[Recipe] = []
    met: set[str] = set()
    while waiting:
        # the first of equals, so that the order is the same each time
        best = max(waiting, key=lambda recipe: (recipe.local, len(_features(recipe) - met)))
        waiting.remove(best)
        done.append(best)
        met |= _features(best)
    return done


def _features(recipe: Recipe) -> set[str]:
    return {*recipe.flags, recipe.kind}

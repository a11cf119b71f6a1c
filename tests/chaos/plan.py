"""The plan of a chaos run: the faults in batches, shuffled with a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

from megatron.fill.types import JobState
from tests.chaos.kinds import FaultKind, Source

HONEST_PER_BATCH = 2
_BATCH = 30  # faults between two quiet windows
_HONEST_STEPS, _VICTIM_STEPS, _ENDLESS_STEPS = 60, 1_500, 1_000_000


def quotas(kinds: Sequence[FaultKind], faults: int) -> dict[str, int]:
    """The number of faults of each kind, at least one, for ``faults`` in all."""
    whole = sum(kind.weight for kind in kinds)
    return {kind.name: max(1, math.ceil(faults * kind.weight / whole)) for kind in kinds}


def missing(kinds: Sequence[FaultKind], wanted: Mapping[str, int], injected: Mapping[str, int]) -> list[FaultKind]:
    """The faults that are still missing from the quotas: the kind once for each."""
    return [kind for kind in kinds for _ in range(max(0, wanted[kind.name] - injected.get(kind.name, 0)))]


def batches(elements: Sequence[FaultKind], seed: int) -> list[list[FaultKind]]:
    """Shuffle them, and split them into windows of thirty faults."""
    shuffled = list(elements)
    random.Random(seed).shuffle(shuffled)
    return [shuffled[first : first + _BATCH] for first in range(0, len(shuffled), _BATCH)]


def task_of(kind: FaultKind) -> tuple[str, dict[str, object]]:
    """The side task of a job with this fault, and its arguments without the path of the marks."""
    if kind.source is Source.GPU:
        return "tests.chaos.gpu:CudaFault", {"kind": kind.name.partition("-")[2]}
    if kind.name.startswith("raise-"):
        where = kind.name.removeprefix("raise-").replace("-", "_")
        return "tests.chaos.tasks:Raising", {"where": where, "steps": _ENDLESS_STEPS}
    if kind.source is Source.ATTACK:
        steps = _HONEST_STEPS if kind.state is JobState.SUCCEEDED else _ENDLESS_STEPS
        return "tests.chaos.attacks.task:Attacker", {"attack": kind.name, "steps": steps}
    if kind.source is Source.TASK and kind.name != "honest":
        steps = _HONEST_STEPS if kind.state is JobState.SUCCEEDED else _ENDLESS_STEPS
        return "tests.chaos.tasks:Fault", {"kind": kind.name, "steps": steps}
    steps = _VICTIM_STEPS if kind.source is Source.VICTIM else _HONEST_STEPS
    return "tests.chaos.tasks:Honest", {"steps": steps}

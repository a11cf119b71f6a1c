"""What the configurator says that a GPU holds, against what Megatron's own iteration holds under fake tensors."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron.fill.errors import ConfigError
from megatron.fill.pipeline.bubbles import peak_activation_bytes
from megatron.fill.pipeline.schedules import make_schedule
from megatron.fill.wings.configure.cluster import Cluster
from megatron.fill.wings.configure.correction import Network, features
from megatron.fill.wings.configure.flags import read_flags
from megatron.fill.wings.configure.peaks import Peak, errors_on, fitted
from megatron.fill.wings.configure.room import margins, memory
from megatron.fill.wings.configure.search import Evaluator, search
from megatron.fill.wings.configure.space import layouts, padded
from megatron.fill.wings.mainjob.hardware import GIB
from megatron.fill.wings.mainjob.memory import activation_bytes, stage_memory
from megatron.fill.wings.mainjob.parallel import Parallel, Recompute
from tests.support.memory_cases import CASES, Case, asked, random_case, stages
from tests.support.memory_truth import Asked, Truth, truths

LARGER = 32  # GPUs: from there on a training is for the test alone
MODELS = (
    "--num-layers 4 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --vocab-size 51199 "
    "--global-batch-size 16 --bf16",
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --vocab-size 32767 "
    "--global-batch-size 32 --bf16 --swiglu --disable-bias-linear --position-embedding-type rope",
)
CLUSTERS = ((1, 4), (1, 8), (2, 4))
SHARES = (0.35, 0.6, 0.9)  # of the way from what the smallest layout takes to what the middle one does


def found(wanted: Sequence[Asked], cache: Path | None) -> list[Truth]:
    """Their truths; those of an earlier call are read from the cache, and new ones added."""
    known: dict[Asked, Truth] = {}
    if cache is not None and cache.exists():
        for line in cache.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            one = Asked(tuple(entry["flags"]), entry["rank"], entry["gpus"])
            known[one] = Truth(entry["states_bytes"], entry["peak_bytes"], entry["parameters"])
    missing = [one for one in dict.fromkeys(wanted) if one not in known]
    for one, truth in zip(missing, truths(missing), strict=True):
        known[one] = truth
        if cache is not None:
            with cache.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(one) | asdict(truth)) + "\n")
    return [known[one] for one in wanted]


def published_bytes(case: Case, stage: int) -> int:
    """By Megatron's own accounting and Korthikanti et al. 2022, as the simulator counts."""
    model, its = case
    schedule = make_schedule(its.schedule, its.pp, its.microbatches, its.chunks)
    return stage_memory(
        model, its, stage, peak_activation_bytes(schedule, activation_bytes(model, its))[stage]
    ).total_bytes


def measure_memory(cache: Path | None) -> dict[str, Any]:
    """Errors over the cases, of each rank that is compared."""
    names = [(name, stage) for name, case in CASES.items() for stage in stages(case[1])]
    its = found([asked(CASES[name], stage) for name, stage in names], cache)
    errors, published, rows = [], [], {}
    for (name, stage), truth in zip(names, its, strict=True):
        case = CASES[name]
        ours = memory(*case)[stage].total_bytes
        errors.append(abs(ours / truth.peak_bytes - 1))
        published.append(abs(published_bytes(case, stage) / truth.peak_bytes - 1))
        rows[f"{name}, stage {stage}"] = {"truth_bytes": truth.peak_bytes, "estimate_bytes": ours}
    return {
        "memory_cases": len(CASES),
        "memory_ranks": len(errors),
        "memory_mean": sum(errors) / len(errors),
        "memory_worst": max(errors),
        "memory_published_mean": sum(published) / len(published),
        "memory_published_worst": max(published),
        "rows": rows,
    }


def _samples(count: int) -> Iterator[tuple[Case, int]]:
    """The cases, and random trainings."""
    for case in CASES.values():
        for stage in stages(case[1]):
            yield case, stage
    for seed in range(count):
        source = random.Random(seed)
        case = random_case(source)
        try:
            case[1].check(case[0])
        except ValueError:
            continue
        yield case, source.choice(stages(case[1]))


def measure_learned(count: int, cache: Path | None) -> dict[str, Any]:
    """The correction, and a network that learns peaks without the accounting, on what they have not seen."""
    samples = list(_samples(count))
    its = found([asked(case, stage) for case, stage in samples], cache)
    peaks = [Peak(*case, stage, truth.peak_bytes) for (case, stage), truth in zip(samples, its, strict=True)]
    small = [one for one in peaks if one.parallel.gpus < LARGER]
    random.Random(0).shuffle(small)
    taught, parts = [one for at, one in enumerate(small) if at % 5], {"held_out": small[::5]}
    parts["larger"] = [one for one in peaks if one.parallel.gpus >= LARGER]
    correction = fitted(taught)
    alone = Network.fit(_rows(taught), np.log([one.peak_bytes for one in taught]))
    figures: dict[str, Any] = {"taught": len(taught)}
    for name, part in parts.items():
        errors = np.abs(np.exp(alone(_rows(part))) / np.array([one.peak_bytes for one in part]) - 1)
        network = {"network_mean": float(errors.mean()), "network_worst": float(errors.max())}
        figures[name] = asdict(errors_on(correction, part)) | network
    return figures


def _rows(peaks: Sequence[Peak]) -> Any:
    """Features without the two that the accounting gives."""
    return np.array([list(features(one.model, one.parallel, one.stage).values())[:-2] for one in peaks])


def _fewer(its: Parallel) -> Parallel:
    """With as few micro-batches as take as much memory: what is in flight does not grow any more."""
    enough = 2 * its.pp if its.chunks > 1 else its.pp + 1
    return replace(its, global_batch=min(its.microbatches, enough) * its.microbatch * its.dp)


def measure_limits(sample: int, cache: Path | None) -> dict[str, Any]:
    """Proposals that hold more than there is room for, by the truth; and layouts that fit and are refused.

    The room is set so that some layouts fit and others do not.
    """
    source = random.Random(0)
    tried = []
    for shape, flags, share in itertools.product(CLUSTERS, MODELS, SHARES):
        tried += list(_with_room(shape, flags, share, sample, source))
    held = [[one.total_bytes for one in memory(*one.case)] for one in tried]
    wanted = [
        asked((one.case[0], _fewer(one.case[1])), its.index(max(its))) for one, its in zip(tried, held, strict=True)
    ]
    over = proposals = refused = feasible = 0
    for one, its, truth in zip(tried, held, found(wanted, cache), strict=True):
        fits = truth.peak_bytes <= one.room.room_bytes
        if one.proposed:
            proposals += 1
            over += not fits
        else:
            feasible += fits
            refused += fits and max(its) * margins(one.case[0]).high > one.room.room_bytes
    return {
        "proposals": proposals,
        "over_limit": over,
        "feasible": feasible,
        "refused_feasible": refused / max(1, feasible),
    }


@dataclass(frozen=True, slots=True)
class _Tried:
    """A layout on a cluster, proposed by the search or drawn at random."""

    case: Case
    room: Cluster
    proposed: bool


def _with_room(
    shape: tuple[int, int], flags: str, share: float, sample: int, source: random.Random
) -> Iterator[_Tried]:
    # The truth is of Megatron's local layers, which have no context parallelism.
    training = read_flags([*flags.split(), "--transformer-impl", "local", "--context-parallel-size", "1"])
    plain = _cluster(*shape, 80 * GIB)
    evaluator = Evaluator(training, plain, plain.links(Path()))
    there = list(layouts(training, plain.gpus, plain.gpus_per_node, Counter()))
    needs = sorted(evaluator.least_bytes(one) for one in there)
    room = _cluster(*shape, int(needs[0] + share * (needs[len(needs) // 2] - needs[0])))
    with contextlib.suppress(ConfigError):  # nothing fits
        for one in search(Evaluator(training, room, room.links(Path())), 2).proposals:
            yield _Tried((padded(training, one.parallel.tp), one.parallel), room, True)
    for its in source.sample(there, sample):
        again = replace(its, recompute=source.choice(list(Recompute)))
        yield _Tried((padded(training, its.tp), again), room, False)


def _cluster(nodes: int, gpus: int, room: int) -> Cluster:
    fields = {"nodes": nodes, "gpus_per_node": gpus, "gpu": "a100-80gb", "network": "p3dn.24xlarge"}
    return Cluster.model_validate(fields | {"memory": room + 1, "memory_reserve": 1})

"""Frozen towers in the bubbles of a language model, against the same towers in the first stage.

Two stages on two cores.  The towers are computed in the first stage, or ahead, in the bubbles of both ranks; each with
the two divisions of the language model's layers among the stages that are the fastest by the plans' timelines.  These
trainings take turns.  Afterwards the division that was the fastest ahead is trained again, ahead and in place, and the
two are compared loss by loss and gradient norm by gradient norm.
"""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from megatron.fill.wings.graph.cost import Cluster
from megatron.fill.wings.graph.files import plan_text
from megatron.fill.wings.graph.model import ModelGraph, Operator
from megatron.fill.wings.graph.plan import Plan, Stage
from megatron.fill.wings.graph.timeline import simulate
from megatron.fill.wings.mainjob.hardware import GPUS
from scripts.benchmarks.forked import ForkedRanks, preload
from scripts.benchmarks.trainings import losses, settings
from scripts.benchmarks.turns import Training

LANGUAGE = 8  # layers
HIDDEN, SEQUENCE = 256, 128
BATCH = 8
_KNOWN = 14  # iterations until it is known how long waits are, and passes are as far ahead as they get
COMPARED = 6  # iterations, loss by loss
_SAID = re.compile(r"(\d+) of (\d+) passes of frozen operators were in bubbles")


def model(vision: int, language: int) -> ModelGraph:
    """Work in the unit of one position of a tower's layer, forward."""
    positions = {"vision": SEQUENCE, "audio": SEQUENCE // 2, "language": 5 * SEQUENCE // 2}
    operators = []
    for tower, layers in (("vision", vision), ("audio", 1), ("language", language)):
        for number in range(layers):
            inputs: tuple[str, ...] = (f"{tower}.{number - 1}",) if number else ()
            if tower == "language" and not number:
                inputs = (f"vision.{vision - 1}", "audio.0")
            frozen = tower != "language"
            work_s = positions[tower] * 1e-6
            operators.append(Operator(name=f"{tower}.{number}", inputs=inputs, forward_s=work_s, frozen=frozen))
    return ModelGraph("towers", (*operators, Operator(name="loss", inputs=(f"language.{language - 1}",))))


def plan(graph: ModelGraph, first: int, microbatches: int) -> Plan:
    """Two stages; the first one has all towers that are in stages, and so many layers of the language model."""
    language = [its.name for its in graph.operators if not its.frozen]
    towers = [its.name for its in graph.operators if its.frozen]
    size = BATCH // microbatches
    cluster = Cluster(devices=2, gpu=GPUS["v100-16gb"], network=None)
    stages = (
        Stage((*towers, *language[:first]), (0,), size, 1, min(2, microbatches) * size),
        Stage(tuple(language[first:]), (1,), size, 1, size),
    )
    return Plan(graph, cluster, BATCH, stages)


def encoder_share(graph: ModelGraph) -> float:
    """Of the work of an iteration: a frozen operator has a forward pass alone, the others three times as much."""
    frozen_s, trained_s = (
        sum(its.forward_s or 0.0 for its in graph.operators if its.frozen is of) for of in (True, False)
    )
    return frozen_s / (frozen_s + 3 * trained_s)


def _best(graph: ModelGraph, microbatches: int) -> list[int]:
    """The two divisions that are the fastest by the plans' timelines."""
    return sorted(range(1, LANGUAGE + 1), key=lambda at: simulate(plan(graph, at, microbatches)).period_ns)[:2]


def _program(folder: Path, its: Plan, *flags: str) -> list[str]:
    (folder / "plan.json").write_text(plan_text(its), encoding="utf-8")
    program = [
        "-m",
        "pipefill_patches",
        "examples/graph/train_two_towers.py",
        "--graph-plan",
        str(folder / "plan.json"),
    ]
    program += f"--hidden-size {HIDDEN} --seq-length {SEQUENCE} --lr 1e-3 --lr-decay-style constant".split()
    return [*program, "--log-interval", "1", "--fill-report", str(folder / "run"), *flags]


def _endless(folder: Path, name: str, its: Plan) -> Training:
    """One that takes turns."""
    (folder / f"{name}-plan").mkdir()
    flags = [
        "--train-iters",
        "100000",
        "--exit-signal-handler",
        "--fill-profile-only",
        *settings(trace_iterations=5000),
    ]
    program = _program(folder / f"{name}-plan", its, *flags)
    program[program.index("--fill-report") + 1] = str(folder / name / "run")
    return Training(folder / name, program, 2)


def _losses(folder: Path, name: str, its: Plan) -> list[tuple[float, float]]:
    """Of a training of a few iterations: losses and gradient norms, to the bit."""
    own = folder / f"{name}-compared"
    own.mkdir()
    flags = f"--train-iters {COMPARED} --tensorboard-log-interval 1 --tensorboard-dir {own}/tensorboard".split()
    ranks = ForkedRanks(_program(own, its, *flags), own / "log", 2)
    try:
        ranks.wait(300.0)
    except BaseException:
        ranks.kill()
        raise
    found, norms = losses(own / "tensorboard"), losses(own / "tensorboard", "grad-norm")
    return [(found[at], norms[at]) for at in sorted(found)]


def measure(rounds: int, each: int, vision: int, microbatches: int) -> dict[str, Any]:
    """Train all in turns.

    Args:
        vision: layers of the larger tower.
        rounds: how often each has its turn; ``each`` its iterations in a turn.
    """
    graph = model(vision, LANGUAGE)
    apart = graph.running_ahead()
    plans = {
        f"{name}, {at} layers first": plan(its, at, microbatches)
        for name, its in (("in place", graph), ("ahead", apart))
        for at in _best(its, microbatches)
    }
    preload()
    with tempfile.TemporaryDirectory(prefix="pipefill-") as name:
        folder = Path(name)
        trainings: dict[str, Training] = {}
        order = list(plans)
        try:
            for number, (title, its) in enumerate(plans.items()):
                trainings[title] = _endless(folder, str(number), its)
            for one in trainings.values():
                one.turn(_KNOWN, counts=False)
            source = random.Random(0)
            for _ in range(rounds):
                source.shuffle(order)  # so that no one always follows the same other
                for title in order:
                    trainings[title].turn(each)
            for one in trainings.values():
                one.end()
        except BaseException:
            for one in trainings.values():
                one.kill()
            raise
        times = {title: list(chain.from_iterable(one.periods_s())) for title, one in trainings.items()}
        usual = {title: median(one) for title, one in times.items()}
        place, ahead = (
            min((one for one in usual if kind in one), key=usual.__getitem__) for kind in ("place", "ahead")
        )
        in_bubbles = _in_bubbles(trainings[ahead].folder / "log")
        first = len(plans[ahead].stages[0].operators)
        compared = [
            _losses(folder, kind, plan(its, first, microbatches)) for kind, its in (("own", graph), ("go", apart))
        ]
    return {
        "share": encoder_share(graph),
        "gain": 1 - usual[ahead] / usual[place],
        "gain_ci95": _interval(times[ahead], times[place]),
        "compared_with": place,
        "fastest": ahead,
        "iteration_s": usual,
        "iterations": {title: len(one) for title, one in times.items()},
        "in_bubbles": in_bubbles,
        "compared": len(compared[0]),
        "identical": compared[0] == compared[1] and len(compared[0]) == COMPARED,
    }


def _in_bubbles(log: Path) -> float:
    """The share of the frozen operators' passes, of all ranks."""
    found = [tuple(map(int, match)) for match in _SAID.findall(log.read_text(encoding="utf-8"))]
    if len(found) != 2:
        raise RuntimeError(f"{len(found)} of 2 ranks said what they ran ahead; see the end of {log}")
    return sum(one for one, _ in found) / sum(every for _, every in found)


def _interval(ahead: Sequence[float], other: Sequence[float]) -> list[float]:
    """Of the gain, by bootstrap over iterations."""
    source = np.random.default_rng(0)
    draws = [np.median(source.choice(np.array(one), (2000, len(one))), axis=1) for one in (ahead, other)]
    return [float(one) for one in np.percentile(1 - draws[0] / draws[1], [2.5, 97.5])]

"""How good is the configurator, and how fast?  What can be said of it without a cluster.

- ``timeline``: the iteration's length against an evaluation by discrete events, on random cases: uneven stages, a time
  of its own for each link and direction, virtual stages, several replicas.
- ``search``: whether it finds what timing everything finds, on clusters of up to 64 GPUs and models of several sizes.
- ``speed``: 512 GPUs, all dimensions, the ten best; and how many configurations a second are bounded.
- ``dedication``: rank orders on networks whose links differ up to 8 times, by the number of nodes: ours (--seconds) and
  annealing as Pipette does it, without restarts (--pipette-seconds), both with the same energy; the iteration in ms,
  and what no order is below.  On 8 nodes also the optimum of all orders.
- ``memory``: what a GPU is said to hold against Megatron's own iteration under fake tensors, on forty trainings; also
  of the published formulas.
- ``learned``: the learned correction on trainings that it has not seen, and on larger clusters (--samples random ones).
- ``limits``: proposals that hold more than there is room for, by that truth, and layouts that fit and are refused.
- ``gpu-memory``: peaks that others measured on GPUs (``--truth FOLDER``; ``configure_gpu_memory.py``).
- ``gpu-time``: likewise iteration times (``configure_gpu_time.py``).
- ``waits``: likewise how long each stage waits (``configure_waits.py``).
- ``recipes``: whether the layouts that NVIDIA published are among the first (``configure_recipes.py``).

    python scripts/benchmarks/bench_configure.py --parts timeline search speed dedication --json FILE
    python scripts/benchmarks/bench_configure.py --parts gpu-memory --truth FOLDER --json FILE
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.fill.errors import ConfigError
from megatron.fill.wings.configure.cluster import Cluster
from megatron.fill.wings.configure.dedicate import anneal
from megatron.fill.wings.configure.energy import Energy
from megatron.fill.wings.configure.flags import Training, read_flags
from megatron.fill.wings.configure.latency import bound_ns, timeline
from megatron.fill.wings.configure.rows import layout_of
from megatron.fill.wings.configure.search import Evaluator, search
from megatron.fill.wings.configure.space import layouts
from megatron.fill.wings.mainjob.hardware import GPUS
from megatron.fill.wings.mainjob.model import MODELS
from megatron.fill.wings.mainjob.parallel import Parallel, Recompute
from scripts.benchmarks.configure_gpu_memory import measure_gpu_memory
from scripts.benchmarks.configure_gpu_time import measure_gpu_time
from scripts.benchmarks.configure_recipes import measure_recipes
from scripts.benchmarks.configure_waits import measure_waits
from scripts.benchmarks.harness import Results, arguments, check_above_zero, opened
from scripts.benchmarks.memory_figures import measure_learned, measure_limits, measure_memory
from tests.support.configuring import event_times, random_iteration, random_links

MODEL_FLAGS = {
    "0.1b": "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --vocab-size 50257 "
    "--global-batch-size 32 --bf16",
    "5b": "--num-layers 24 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --vocab-size 50257 "
    "--global-batch-size 64 --bf16",
    "experts": "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --vocab-size 32000 "
    "--global-batch-size 32 --bf16 --num-experts 8 --moe-router-topk 2 --disable-bias-linear",
}
LARGE = (
    "--num-layers 48 --hidden-size 8192 --num-attention-heads 64 --seq-length 2048 --vocab-size 50257 "
    "--global-batch-size 1024 --bf16"
)
CLUSTERS = ((1, 4, "a100-40gb"), (1, 8, "v100-16gb"), (2, 8, "a100-80gb"), (4, 4, "v100-32gb"), (8, 8, "a100-40gb"))
STAGES = 8  # of dedication
PARTS = ("timeline", "search", "speed", "memory", "learned", "limits", "dedication")
OF_OTHERS = ("gpu-memory", "gpu-time", "waits", "recipes")  # whose measurements are in a folder
PLACES = {
    "gpu-memory": ("gpu_memory",),
    "gpu-time": ("gpu_time",),
    "waits": ("waits",),
    "recipes": ("recipes",),
    "learned": ("memory_learned",),
}  # in the summary


def cluster(nodes: int, gpus: int, gpu: str) -> Cluster:
    fields = {"nodes": nodes, "gpus_per_node": gpus, "gpu": gpu, "network": "p3dn.24xlarge"}
    return Cluster.model_validate(fields)


def evaluator_of(training: Training, its: Cluster) -> Evaluator:
    return Evaluator(training, its, its.links(Path()))


def measure_timeline(cases: int) -> dict[str, Any]:
    worst = above = 0.0
    for seed in range(cases):
        its = random_iteration(random.Random(seed))
        found, expected = timeline(its).period_ns, event_times(its)
        worst = max(worst, abs(found - expected) / expected)
        above = max(above, bound_ns(its) / found)
    return {"timeline_cases": cases, "timeline_error": worst, "bound_over_timeline": above}


def shortest(evaluator: Evaluator, top: int) -> list[int]:
    """Of each layout that fits, all its numbers of virtual stages timed, in ns."""
    times: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for its in layouts(evaluator.training, evaluator.cluster.gpus, evaluator.cluster.gpus_per_node, Counter()):
        for kind in Recompute:
            found = evaluator.proposal(evaluator.iteration(replace(its, recompute=kind)))
            if found is not None:
                times[layout_of(its)].append(found.timeline.period_ns)
                break
    return sorted(map(min, times.values()))[:top]


def measure_search() -> dict[str, Any]:
    equal = tried = 0
    for (nodes, gpus, gpu), flags in itertools.product(CLUSTERS, MODEL_FLAGS.values()):
        training, its = read_flags(flags.split()), cluster(nodes, gpus, gpu)
        expected = shortest(evaluator_of(training, its), 10)
        try:
            proposals = search(evaluator_of(training, its)).proposals
        except ConfigError:
            proposals = []
        tried += 1
        equal += [one.timeline.period_ns for one in proposals] == expected
    return {"searches": tried, "search_equals_brute_force": equal / tried}


def measure_speed() -> dict[str, Any]:
    training, its = read_flags(LARGE.split()), cluster(64, 8, "a100-80gb")
    evaluator = evaluator_of(training, its)
    began_s = time.perf_counter()
    found = search(evaluator)
    search_s = time.perf_counter() - began_s
    excluded: Counter[str] = Counter()
    began_s = time.perf_counter()
    bounded = sum(bound_ns(evaluator.iteration(one)) > 0 for one in evaluator.candidates(excluded))
    bound_s = time.perf_counter() - began_s
    return {
        "search_512_s": search_s,
        "configurations": found.configurations,
        "timed": found.timed,
        "configs_per_s": (bounded + excluded["memory"]) / bound_s,
    }


def measure_dedication(nodes: int, seconds: float, pipette_s: float) -> dict[str, Any]:
    """With one GPU a node, eight stages, and replicas of them."""
    links = random_links(random.Random(nodes), nodes, 1)
    its = Parallel(pp=STAGES, dp=nodes // STAGES, microbatch=1, global_batch=16 * nodes)
    energy = Energy(MODELS["gpt-5b"], GPUS["a100-80gb"], 0.45, its, links)
    began_s = time.perf_counter()
    ours = anneal(energy, its, 1, 0, 10**9, seconds)
    took_s = time.perf_counter() - began_s
    other = anneal(energy, its, 1, 0, 10**9, pipette_s, as_pipette=True)
    row = {
        "ours_ms": ours.energy_ns / 1e6,
        "ours_s": took_s,
        "ours_moves": ours.moves,
        "annealing_ms": other.energy_ns / 1e6,
        "annealing_s": pipette_s,
        "identity_ms": ours.identity_ns / 1e6,
        "least_ms": ours.least_ns / 1e6,
    }
    if nodes == STAGES:
        row["optimum_ms"] = min(map(energy, itertools.permutations(range(nodes)))) / 1e6
    return row


def report(name: str, figures: dict[str, Any]) -> None:
    print(f"{name}:")
    for key, value in figures.items():
        text = value if isinstance(value, dict) else {"": value}
        print(f"  {key:<34}", *(f"{part} {_shown(its)}" for part, its in text.items()))


def _shown(value: Any) -> str:
    return "-" if value is None else f"{value:.5g}" if isinstance(value, int | float) else str(value)


def main() -> None:
    parser = arguments(__doc__)
    every = (*PARTS, *OF_OTHERS)
    help_text = "which (default: without those of GPUs)"
    parser.add_argument("--parts", nargs="+", choices=every, default=list(PARTS), help=help_text)
    parser.add_argument("--cases", type=int, default=10_000, help="of the timeline (default: 10000)")
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 16, 32, 64], help="multiples of 8, of dedication")
    parser.add_argument("--seconds", type=float, default=5.0, help="for our rank order (default: 5)")
    parser.add_argument("--pipette-seconds", type=float, default=60.0, help="for Pipette's (default: 60)")
    parser.add_argument("--truth", metavar="FOLDER", type=Path, help="of gpu-..., waits and recipes, which need it")
    parser.add_argument("--most-gpus", type=int, default=1024, help="of a training of recipes (default: 1024)")
    parser.add_argument("--samples", type=int, default=60, help="random trainings of learned (default: 60)")
    parser.add_argument(
        "--truths", metavar="FILE", type=Path, help="keep the truths here, and take those that are here"
    )
    options = parser.parse_args()
    if options.truth is None and (needing := [part for part in options.parts if part in OF_OTHERS]):
        parser.error(f"--parts {' '.join(needing)}: expected --truth FOLDER")
    check_above_zero(parser, options, "cases", "seconds", "pipette_seconds", "most_gpus", "samples")
    if wrong := [nodes for nodes in options.nodes if nodes < 1 or nodes % STAGES]:
        parser.error(f"argument --nodes: {wrong[0]}: expected multiples of {STAGES}")
    results: Results = opened(parser, options.json)
    for part in options.parts:
        if part == "dedication":
            for nodes in options.nodes:
                row = measure_dedication(nodes, options.seconds, options.pipette_seconds)
                report(f"dedication, {nodes} nodes", row)
                results.add(part, row, "dedication", str(nodes))
            continue
        measure = {
            "timeline": lambda: measure_timeline(options.cases),
            "search": measure_search,
            "speed": measure_speed,
            "memory": lambda: measure_memory(options.truths),
            "learned": lambda: measure_learned(options.samples, options.truths),
            "limits": lambda: measure_limits(3, options.truths),
            "gpu-memory": lambda: measure_gpu_memory(options.truth),
            "gpu-time": lambda: measure_gpu_time(options.truth),
            "waits": lambda: measure_waits(options.truth),
            "recipes": lambda: measure_recipes(options.truth, options.most_gpus),
        }[part]
        try:
            figures = measure()
        except ConfigError as error:
            parser.error(f"--parts {part}: {error}")
        details = {name: figures.pop(name) for name in ("rows", "groups") if name in figures}
        only_shown = figures.pop("recipes", {})
        report(part, figures | details.get("groups", {}) | only_shown)
        results.add(part, figures, *PLACES.get(part, ()), **details)


if __name__ == "__main__":
    main()

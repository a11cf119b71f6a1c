"""What each part of the configurator brings, and what it costs: studies in its own model, on two clusters as data.

The clusters are those of Pipette's paper: 16 nodes of eight V100 with InfiniBand EDR, and of eight A100 with HDR.  What
nodes reach of their data sheet differs from pair of nodes to pair of nodes by up to ``SPREAD`` times, at random.

- ``ablation``: AMP's layout in the cluster's own order over ours, and over ours with ranks dedicated to links; all by
  the timeline on the links as they are.
- ``microbatch``: for each micro-batch size the best layout's iteration over the best of all.
- ``scaling``: seconds of an iteration and of the search, by the number of nodes and by the model.
- ``overhead``: what configuring takes in seconds, by its parts, and how many iterations that is.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.fill.errors import ConfigError
from megatron.fill.wings.configure.choose import dedicated
from megatron.fill.wings.configure.cluster import Cluster
from megatron.fill.wings.configure.flags import Training, read_flags
from megatron.fill.wings.configure.links import Links
from megatron.fill.wings.configure.search import Evaluator, Proposal, search
from scripts.benchmarks.configure_baselines import amp

CLUSTERS = {"v100-edr": "v100-32gb", "a100-hdr": "a100-80gb"}  # network: GPU
NODES, SPREAD = 16, 3.0
MODELS = {
    "2b": "--num-layers 24 --hidden-size 2560 --num-attention-heads 32",
    "5b": "--num-layers 24 --hidden-size 4096 --num-attention-heads 32",
    "13b": "--num-layers 40 --hidden-size 5120 --num-attention-heads 40",
}
REST = "--seq-length 2048 --vocab-size 50257 --global-batch-size 512 --bf16"
MOVES = 3000


def training(model: str, extra: str = "") -> Training:
    return read_flags(f"{MODELS[model]} {REST} {extra}".split())


def cluster(network: str, nodes: int) -> Cluster:
    fields = {"nodes": nodes, "gpus_per_node": 8, "gpu": CLUSTERS[network], "network": network}
    return Cluster.model_validate(fields)


def uneven(its: Cluster, seed: int = 0) -> Links:
    """The cluster's links, those between nodes slower by a factor for each pair of nodes."""
    links = its.links(Path())
    source = random.Random(seed)
    factor = {
        (min(pair), max(pair)): SPREAD ** -source.random()
        for pair in ((one, other) for one in range(its.nodes) for other in range(one))
    }
    nodes = links.nodes

    def share(one: int, other: int) -> float:
        here, there = nodes[one], nodes[other]
        return 1.0 if here == there else factor[min(here, there), max(here, there)]

    rows = [[speed * share(one, other) for other, speed in enumerate(row)] for one, row in enumerate(links.bytes_per_s)]
    return replace(links, bytes_per_s=rows, period=0)


def measure_studies(nodes: int = NODES) -> dict[str, Any]:
    """All of them, by name."""
    return {
        "ablation": {f"{model} on {name}": _ablation(model, name, nodes) for name in CLUSTERS for model in MODELS},
        "microbatch": {f"{model} on a100-hdr": _microbatch(model, nodes) for model in MODELS},
        "scaling": {
            f"{model} on {count} nodes": _scaling(model, count)
            for model in MODELS
            for count in (2, 4, 8, 16)
            if count <= nodes
        },
        "overhead": {f"5b on {name}": _overhead("5b", name, nodes) for name in CLUSTERS},
    }


def _ablation(model: str, name: str, nodes: int) -> dict[str, float | None]:
    its = cluster(name, nodes)
    evaluator = Evaluator(training(model), its, uneven(its))
    ours = search(evaluator.training, its, evaluator.links, 10).proposals
    best = min((_dedicated(evaluator, one) for one in ours), key=_ns)
    other = amp(evaluator)
    return {
        "amp_s": None if other is None else other.iteration_s,
        "latency_model": None if other is None else other.iteration_s / ours[0].iteration_s,
        "and_dedication": None if other is None else other.iteration_s / best.iteration_s,
        "amp_and_dedication": None if other is None else other.iteration_s / _dedicated(evaluator, other).iteration_s,
    }


def _dedicated(evaluator: Evaluator, one: Proposal) -> Proposal:
    return dedicated(evaluator, one, 0, MOVES)


def _ns(one: Proposal) -> int:
    return one.timeline.period_ns


def _microbatch(model: str, nodes: int) -> dict[str, float | None]:
    its = cluster("a100-hdr", nodes)
    times: dict[str, float | None] = {}
    for size in (1, 2, 4, 8):
        try:
            found = search(training(model, f"--micro-batch-size {size}"), its, its.links(Path()), 1)
            times[str(size)] = found.proposals[0].iteration_s
        except ConfigError:
            times[str(size)] = None
    best_s = min(time_s for time_s in times.values() if time_s is not None)
    return {size: None if time_s is None else time_s / best_s for size, time_s in times.items()}


def _scaling(model: str, nodes: int) -> dict[str, float | None]:
    its = cluster("a100-hdr", nodes)
    links = uneven(its)
    began_s = time.perf_counter()
    try:
        found = search(training(model), its, links, 10)
    except ConfigError:
        return {"iteration_s": None, "search_s": time.perf_counter() - began_s}
    return {
        "iteration_s": found.proposals[0].iteration_s,
        "search_s": time.perf_counter() - began_s,
        "configurations": found.configurations,
    }


def _overhead(model: str, name: str, nodes: int) -> dict[str, float]:
    """Measuring the network and the passes is not in it: that is up to the cluster."""
    its = cluster(name, nodes)
    evaluator = Evaluator(training(model), its, uneven(its))
    began_s = time.perf_counter()
    ours = search(evaluator.training, its, evaluator.links, 10).proposals
    searched_s = time.perf_counter()
    best = min((_dedicated(evaluator, one) for one in ours), key=_ns)
    ended_s = time.perf_counter()
    return {
        "search_s": searched_s - began_s,
        "dedication_s": ended_s - searched_s,
        "iterations": (ended_s - began_s) / best.iteration_s,
    }

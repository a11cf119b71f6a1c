"""Gain of filling for one training, as its flags lay it out."""

from __future__ import annotations

from dataclasses import replace
from math import lcm
from pathlib import Path
from typing import Any

from megatron.fill.errors import ConfigError
from megatron.fill.wings.configure.cluster import Cluster
from megatron.fill.wings.configure.flags import Training, counted_layers
from megatron.fill.wings.configure.search import Evaluator, search
from megatron.fill.wings.configure.value import Valued, fill_kinds, valued
from megatron.fill.wings.mainjob.hardware import GPUS, NETWORKS
from megatron.fill.wings.mainjob.parallel import Recompute

_MOST_NODES = 4096
# Megatron's layout where flags say nothing.  Layers are divided evenly.
_DEFAULTS: dict[str, Any] = dict.fromkeys(("tp", "pp", "cp", "ep", "chunks", "microbatch"), 1) | {
    "recompute": Recompute.NONE,
    "stage_layers": None,
    "sequence_parallel": False,
    "distributed_optimizer": False,
}


def figures(training: Training, gpus: int | None, gpu: str, network: str, schedule: Path | None = None) -> Valued:
    """Its time, memory and bubbles, with what the bubbles are worth; flags that are left out mean Megatron's defaults.

    Args:
        gpus: number of GPUs of the training; None for the fewest whole nodes that replicas fill, or one replica in one.
        schedule: file of the schedule, in torch's form; None for Megatron's.

    Raises:
        ConfigError: a name is not known, or the layout is invalid or does not fit, or the file is wrong.
    """
    for option, name, known in (("--gpu", gpu, list(GPUS)), ("--network", network, list(NETWORKS))):
        if name not in known:
            raise ConfigError(f"{option} is {name!r}: expected one of {', '.join(known)}")
    fixed = _DEFAULTS | dict(training.fixed)
    stages = fixed["pp"] * fixed["chunks"]
    if counted_layers(training.model.layers, fixed) % stages and training.fixed.keys().isdisjoint(
        ("stage_layers", "first_layers", "last_layers")
    ):
        raise ConfigError(
            f"--num-layers is {training.model.layers}: expected a multiple of the {stages} stages, virtual ones "
            "included, among which Megatron divides the layers"
        )
    experts = fixed["ep"] * fixed.get("expert_tp", fixed["tp"]) if fixed["ep"] > 1 else 1
    node = NETWORKS[network].gpus_per_node
    replica = fixed["pp"] * lcm(fixed["tp"] * fixed["cp"], experts)
    count = gpus or (replica if replica <= node else lcm(replica, node))
    node = min(node, count)
    if count > _MOST_NODES * node:
        raise ConfigError(f"--gpus is {count}: expected at most {_MOST_NODES * node}, {_MOST_NODES} nodes")
    if count % node:
        raise ConfigError(f"--gpus is {count}: expected at most {node}, the GPUs of a node, or a multiple of that")
    cluster = Cluster(nodes=count // node, gpus_per_node=node, gpu=GPUS[gpu], network=NETWORKS[network])
    held = Training(training.model, training.global_batch, training.precision, fixed, training.others)
    evaluator = Evaluator(held, cluster, cluster.links(Path()))
    found, kinds = search(evaluator, 1).proposals[0], fill_kinds(cluster.gpu, None)
    if schedule is None:
        return valued(found, kinds)
    by_file = evaluator.proposal(evaluator.iteration(replace(found.parallel, schedule=str(schedule.resolve()))))
    if by_file is None:
        raise ConfigError(f"{schedule}: it holds more activations than fit {gpu}: expected less")
    return valued(by_file, kinds)

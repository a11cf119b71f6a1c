"""A configuration as a script that starts the training."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from megatron.fill.linux.files import write_text
from megatron.fill.wings.configure.cluster import Cluster
from megatron.fill.wings.configure.flags import Training, layout_flags
from megatron.fill.wings.configure.overlap import connections, startable
from megatron.fill.wings.configure.search import Proposal


def write_launch(path: Path, training: Training, cluster: Cluster, proposal: Proposal) -> Path | None:
    """Write the script, and beside it the rank order if it is not the cluster's own; return where that order is.

    OSError if something cannot be written.
    """
    its = proposal.parallel
    flags = [*startable(training.others, its), *layout_flags(its, training.model.predicted)]
    order_path = None
    if proposal.order != tuple(range(its.gpus)):
        order_path = path.with_suffix(".order.json").absolute()
        write_text(order_path, json.dumps({"order": list(proposal.order)}) + "\n")
        flags += ["--fill-rank-order", str(order_path)]
    lines = [
        "#!/usr/bin/env bash",
        "# On every node, with NODE_RANK, MASTER_ADDR and MASTER_PORT set; written by pipefill configure.",
        f"# Predicted: {proposal.iteration_s:.4g} s an iteration, {proposal.bubble_share:.1%} bubbles.",
        "set -euo pipefail",
        *connections(training.others, its),
        f"exec torchrun --nnodes {its.gpus // cluster.gpus_per_node} --nproc-per-node {cluster.gpus_per_node} \\",
        '    --node-rank "${NODE_RANK:-0}" --master-addr "${MASTER_ADDR:-localhost}" \\',
        '    --master-port "${MASTER_PORT:-29500}" "${SCRIPT:-pretrain_gpt.py}" \\',
        f'    {shlex.join(flags)} "$@"',
    ]
    write_text(path, "\n".join(lines) + "\n")
    path.chmod(0o755)
    return order_path

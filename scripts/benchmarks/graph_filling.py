"""A graph of stages that is trained on the CPU with jobs in its bubbles, and without.

Two towers into a language model: examples/graph/train_two_towers.py.  Filling is on and off in paired blocks.  With
more stages than cores, ranks share a core, and a job in one rank's bubble competes with the other rank on its core,
which no GPU does: there the slowdown says nothing of filling, and a job has a core only while no rank on it computes.
So the harvest is given twice: by the time that jobs were in steps, as the report has it, and by the CPU time that they
used.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from megatron.fill.wings.graph.cost import Cluster
from megatron.fill.wings.graph.files import load_model, plan_text
from megatron.fill.wings.graph.search import plan_graph
from megatron.fill.wings.mainjob.hardware import GPUS
from scripts.benchmarks.trainings import (
    ROOT,
    Blocks,
    MainJob,
    identical,
    iterations_of,
    jobs_file,
    p99_slowdown,
    slowdown_of,
)

BATCH, STEP_MS = 8, 2.4
BLOCKS = Blocks(length=5, pairs=8, warmup=30)
_SCRIPT = ("-m", "pipefill_patches", "examples/graph/train_two_towers.py")
_FLAGS = (
    "--hidden-size 384 --seq-length 128 --lr 1e-3 --lr-decay-style constant --log-interval 1",
    "--tensorboard-log-interval 1 --fill-cpu-backend",
)


def fill(blocks: Blocks, stages: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train; the figures, and their details."""
    with tempfile.TemporaryDirectory(prefix="pipefill-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # the jobs run as a user without rights
        graph = load_model(ROOT / "examples" / "graph" / "two_towers.yaml")
        cluster = Cluster(devices=stages, gpu=GPUS["v100-16gb"], network=None)
        plan = plan_graph(graph, cluster, BATCH, (1,)).plan
        file = folder / "plan.json"
        file.write_text(plan_text(plan), encoding="utf-8")
        main = MainJob(_SCRIPT, (f"--graph-plan {file}", *_FLAGS), len(plan.stages))
        task = {"task": "scripts.benchmarks.sidetasks:CpuStep", "args": {"step_ms": STEP_MS}}
        jobs = jobs_file(folder / "jobs.yaml", [{"name": f"job{rank}"} | task for rank in range(main.ranks)])
        same = identical(folder, jobs, blocks, main=main)
        report = json.loads((folder / "jobs-run" / "report.json").read_text(encoding="utf-8"))
        iterations = iterations_of(folder / "jobs-run")
    used_s = sum(job["steps"] for job in report["jobs"]) * STEP_MS / 1e3
    filled_s = report["total"]["fillable_s"] + report["total"]["settling_s"]  # jobs count from their start
    figures = {
        "harvest_ratio": report["summary"]["harvest_ratio"],
        "harvest_ratio_of_cpu_time": used_s / filled_s,
        "losses_identical": same["losses_identical_to_no_jobs"],
        "slowdown": slowdown_of(iterations),
        "p99_slowdown": p99_slowdown(iterations),
    }
    details = {"plan": str(plan), "cores": len(os.sched_getaffinity(0)), "same": same}
    return figures, details | {"ranks": report["ranks"], "total": report["total"]}

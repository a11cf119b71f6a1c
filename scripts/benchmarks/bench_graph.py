"""Graph pipelines, measured: speed-ups by the planner's own costs, the time to search, trainings.

    python scripts/benchmarks/bench_graph.py [PART...] [--json FILE]

The parts are

- ``simulated``: graph against sequential pipelines, with backward passes of two forward passes, without communication;
- ``speedup``: the same for the built-in models with communication, on V100s, over devices and batches;
- ``search``: how long a search takes for 32 devices;
- ``filling``: plans of two towers into a language model (examples/graph/train_two_towers.py), trained on the CPU with
  jobs in their bubbles and without, in paired blocks.

With more stages than cores, ranks share a core, and a job in one rank's bubble competes with the other rank on its
core, which no GPU does: there the slowdown says nothing of filling, and a job has a core only while no rank on it
computes.  So the harvest is given twice: by the time that jobs were in steps, as the report has it, and by the CPU time
that they used.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from megatron.fill.errors import GraphError
from megatron.fill.wings.graph.baselines import plan_sequential
from megatron.fill.wings.graph.cost import Cluster
from megatron.fill.wings.graph.files import load_model, plan_text
from megatron.fill.wings.graph.model import ModelGraph, Operator
from megatron.fill.wings.graph.search import micro_batches, plan_graph
from megatron.fill.wings.graph.zoo import MODELS, candle, mmt
from megatron.fill.wings.mainjob.hardware import GPUS, NETWORKS
from scripts.benchmarks.harness import Results, arguments, opened
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

_GPU, _NETWORK = GPUS["v100-16gb"], NETWORKS["p3.16xlarge"]
_SWEEP = ((8, 128), (8, 256), (16, 256), (16, 512), (32, 256), (32, 512))  # devices and batch
BATCH, STEP_MS = 8, 2.4
BLOCKS = Blocks(length=5, pairs=8, warmup=30)
_SCRIPT = ("-m", "pipefill_patches", "examples/graph/train_two_towers.py")
_FLAGS = (
    "--hidden-size 384 --seq-length 128 --lr 1e-3 --lr-decay-style constant --log-interval 1",
    "--tensorboard-log-interval 1 --fill-cpu-backend",
)


def _even(graph: ModelGraph) -> ModelGraph:
    """The same graph; each operator takes 1 ms forward and 2 ms backward."""
    operators = [Operator(name=its.name, inputs=its.inputs, forward_s=1e-3) for its in graph.operators]
    return ModelGraph(graph.name, tuple(operators))


def simulated(results: Results) -> None:
    """Every operator takes as long, and no branches join.  With one sample a micro-batch there are no replicas."""
    cases: list[tuple[str, ModelGraph, int, int, int, float | None]] = [
        ("case study, m=32", mmt(2, 4, joined=False), 8, 32, 1, 1.114),
        ("candle, 16 devices, m=16", candle(joined=False), 16, 16, 1, 1.94),
        ("candle, 16 devices, m=16, two samples each", candle(joined=False), 16, 16, 2, None),
        *(
            (f"mmt, 32 devices, m={m}", mmt(joined=False), 32, m, 1, aim)
            for m, aim in ((32, 1.62), (64, 1.34), (128, 1.18))
        ),
    ]
    for name, graph, devices, count, size, aim in cases:
        cluster = Cluster(devices=devices, gpu=_GPU, network=None)
        arguments = _even(graph), cluster, count * size, (size,)
        found, line = (planner(*arguments) for planner in (plan_graph, plan_sequential))
        ratio = line.timeline.period_ns / found.timeline.period_ns
        depths = {"stages_deep": found.plan.depth, "stages_sequential": line.plan.depth, "aim": aim}
        aimed = "" if aim is None else f" (aim {aim})"
        print(f"simulated: {name}: {ratio:.3f}{aimed}; {found.plan.depth} deep, not {line.plan.depth}")
        results.add("simulated", {name: ratio}, "simulated")
        results.details.setdefault("simulated_cases", {})[name] = depths
    results.write()


def speedup(results: Results) -> None:
    """Throughput of the graph pipeline over that of the sequential one, by the same costs."""
    best: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    for name, make in MODELS.items():
        for devices, batch in _SWEEP:
            cluster = Cluster(devices=devices, gpu=_GPU, network=_NETWORK)
            sizes = micro_batches(batch)
            try:
                found, line = (planner(make(), cluster, batch, sizes) for planner in (plan_graph, plan_sequential))
            except GraphError as error:
                print(f"speedup: {name}, {devices} devices, batch {batch}: {error}")
                continue
            ratio = line.timeline.period_ns / found.timeline.period_ns
            memory = [max(map(its.plan.memory_bytes, range(len(its.plan.stages)))) / 2**30 for its in (found, line)]
            bubbles = [its.timeline.bubble_share() for its in (found, line)]
            rows.append(
                {"model": name, "devices": devices, "batch": batch, "speedup": ratio}
                | {"bubbles": bubbles, "memory_gib": memory, "deep": [found.plan.depth, line.plan.depth]}
            )
            print(
                f"speedup: {name}, {devices} devices, batch {batch}: {ratio:.2f}; bubbles {bubbles[0]:.0%} for"
                f" {bubbles[1]:.0%}, {found.plan.depth} deep for {line.plan.depth}",
                flush=True,
            )
            best[name] = max(best.get(name, 0.0), ratio)
    results.add("speedup", {"best_speedup": max(best.values()), "speedup_by_model": best}, rows=rows)


def search(results: Results) -> None:
    for name, make in MODELS.items():
        cluster = Cluster(devices=32, gpu=_GPU, network=_NETWORK)
        begin_s = time.perf_counter()
        found = plan_graph(make(), cluster, 512, micro_batches(512))
        seconds = time.perf_counter() - begin_s
        print(f"search: {name}, 32 devices: {seconds:.1f} s, {found.steps} limits")
        results.add("search", {name: seconds}, "search_s")


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


def filling(results: Results) -> None:
    """On as many cores as stages, and with twice as many stages as cores."""
    details = {}
    for stages, where in ((2, ()), (4, ("filling_four_stages",))):
        figures, details[f"{stages}_stages"] = fill(BLOCKS, stages)
        print(f"filling, {stages} stages: {figures}", flush=True)
        results.add("filling", figures, *where, **details)


_ALL = simulated, speedup, search, filling
PARTS = {its.__name__: its for its in _ALL}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)}; default: all")
    given = parser.parse_args()
    if unknown := [part for part in given.parts if part not in PARTS]:
        parser.error(f"PART is {unknown[0]!r}; expected some of {', '.join(PARTS)}")
    results = opened(parser, given.json)
    for part in given.parts or PARTS:
        PARTS[part](results)


if __name__ == "__main__":
    main()

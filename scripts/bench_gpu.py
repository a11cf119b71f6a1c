"""What filling costs and gains on a GPU: a GPT of real size, p stages on ONE GPU, against two ways without gates.

Each stage is a process.  With --sharing mps each gets 100/p percent of the multiprocessors from an MPS daemon of its
own run; with --sharing timeslice they take turns.  NCCL refuses several ranks on one GPU, so the pipeline's transfers
go through the host over gloo.  For 1F1B and the interleaved schedule, in pairs of blocks within one run each:

* slowdown, harvest ratio, fill efficiency (against the same task with the main job standing still, on the same share
  of the multiprocessors), bubble to first step, overruns, and the least memory that was left free;
* the slowdown by the same tasks beside the training without gates.

    python scripts/bench_gpu.py --sharing mps --json gpu.json --png gpu.png

Exit code: 0 when it measured, and also where there is no GPU: it says so in one line, and the JSON file holds only
``not_run`` with the reason.  1 when a training failed, 2 for a wrong flag.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from megatron.fill.records import last_segment
from megatron.fill.report import paired_slowdown
from megatron.fill.sidetask.base import TaskContext
from megatron.fill.sidetask.loader import load_task
from megatron.fill.types import Iteration, fills_block
from scripts.one_gpu import end, mps, training

MODELS = {  # layers, hidden, heads, sequence, micro-batch
    "1.3b": (24, 2048, 16, 2048, 2),
    "350m": (24, 1024, 16, 1024, 4),
    "tiny": (8, 256, 4, 256, 2),
}
COMMON = (
    "--bf16 --lr 1e-4 --lr-decay-style constant --mock-data --tokenizer-type NullTokenizer --vocab-size 32000",
    "--eval-iters 0 --eval-interval 1000000 --log-interval 1 --distributed-backend gloo --transformer-impl local",
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-rope-fusion --no-persist-layer-norm",
)
TASK = "megatron.fill.sidetask.training:TrainingJob"
TASK_ARGS: dict[str, Any] = {"model": "bert-base", "batch_size": 16, "steps": 10_000_000, "pieces": 48}
STOPPED, RUNNING, OVER = range(3)


def arguments(options: argparse.Namespace, schedule: str, iterations: int) -> list[str]:
    layers, hidden, heads, sequence, micro_batch = MODELS[options.model]
    stages = options.stages
    shape = {
        "--pipeline-model-parallel-size": stages,
        "--num-layers": layers,
        "--hidden-size": hidden,
        "--num-attention-heads": heads,
        "--seq-length": sequence,
        "--max-position-embeddings": sequence,
        "--micro-batch-size": micro_batch,
        "--global-batch-size": micro_batch * options.microbatches,
        "--train-iters": iterations,
    }
    if schedule == "interleaved":
        shape["--num-layers-per-virtual-pipeline-stage"] = max(1, layers // (2 * stages))
    return [str(part) for pair in shape.items() for part in pair] + " ".join(COMMON).split() + options.extra.split()


def filled(folder: Path, options: argparse.Namespace, schedule: str) -> dict[str, Any]:
    """Train with a side task in each stage's bubbles, in paired blocks; the run's summary and the memory left."""
    jobs, run_dir = folder / f"{schedule}.json", folder / f"{schedule}-run"
    entries = [{"name": f"bert{at}", "task": TASK, "args": TASK_ARGS} for at in range(options.stages)]
    jobs.write_text(json.dumps({"jobs": entries}), encoding="utf-8")  # JSON is YAML
    flags = ["--fill-jobs", str(jobs), "--fill-report", str(run_dir), "--fill-max-slowdown", "0"]
    flags += ["--fill-paired-blocks", str(options.block), "--fill-warmup-iterations", str(options.warmup)]
    flags += ["--fill-baseline-seconds", "10", "--fill-sharing", options.sharing]
    if options.sharing == "mps":
        flags += ["--fill-sm-percentage", str(100 // options.stages)]
        flags += ["--fill-mps-pipe", os.environ["CUDA_MPS_PIPE_DIRECTORY"]]
    iterations = options.warmup + 2 * options.block * options.pairs
    flags = arguments(options, schedule, iterations) + flags
    with training(options.stages, options.sharing, flags, folder / f"{schedule}.log"):
        pass
    report = json.loads((run_dir / "report.json").read_text(encoding="utf-8"))
    bubbles = [one for record in last_segment(run_dir).records() for one in record.bubbles]
    free = [bubble.free_bytes for bubble in bubbles if bubble.free_bytes]
    return report["summary"] | {"least_free_bytes": min(free, default=None)}


def colocated(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Train while the same tasks run beside it whenever they like, switched on and off in blocks; the slowdown."""
    run_dir = folder / "colocated-run"
    pairs = options.baseline_pairs
    iterations = options.warmup + 2 * options.block * pairs
    switch = folder / "switch"
    switch.write_bytes(bytes([STOPPED]))
    driver = [sys.executable, __file__, "--drive", str(switch)]
    workers = [subprocess.Popen(driver, text=True) for _ in range(options.stages)]
    try:
        time.sleep(30)  # until they are set up
        flags = [*arguments(options, "1f1b", iterations), "--fill-report", str(run_dir)]
        with training(options.stages, options.sharing, flags, folder / "colocated.log") as lines:
            for line in lines:
                seen = re.search(r"iteration +(\d+)/", line)
                if seen:
                    block = _block(int(seen[1]) + 1, options)
                    switch.write_bytes(bytes([RUNNING if fills_block(block) else STOPPED]))
                    if int(seen[1]) == iterations:
                        break
    finally:
        switch.write_bytes(bytes([OVER]))
        with suppress(subprocess.TimeoutExpired):  # a client of MPS should end by itself, with no work outstanding
            for worker in workers:
                worker.wait(30)
        end(workers)
    measured = next(last_segment(run_dir).records()).iterations
    blocks = [(one, _block(one.iteration, options)) for one in measured]
    slowdown = paired_slowdown(
        [Iteration(one.iteration, one.start_ns, one.end_ns, fills_block(block), block) for one, block in blocks]
    )
    assert slowdown is not None
    return {"slowdown": {"mean": slowdown.mean, "ci95": list(slowdown.ci95), "pairs": slowdown.pairs}}


def _block(iteration: int, options: argparse.Namespace) -> int:
    """The block of an iteration (from 1), as the runtime counts them; -1 in the warm-up."""
    past = iteration - 1 - options.warmup
    return past // options.block if past >= 0 else -1


def drive(switch: Path) -> None:
    """Run the side task with nothing between it and the GPU, while the first byte of ``switch`` says so."""
    import torch

    task = load_task(TASK)
    with tempfile.TemporaryDirectory() as directory, switch.open("rb") as file:
        flag = mmap.mmap(file.fileno(), 1, prot=mmap.PROT_READ)
        task.context = TaskContext("bert", Path(directory), "cuda:0")
        task.create(**TASK_ARGS)
        task.init()
        task.start()
        while flag[0] != OVER:
            if flag[0] == RUNNING:
                task.run_next_step()
            else:
                torch.cuda.synchronize()
                time.sleep(0.001)
        torch.cuda.synchronize()


def draw(summary: dict[str, Any], path: Path) -> None:
    """Slowdowns with their intervals beside harvest ratios, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.5), constrained_layout=True)
    for name, found in summary.items():
        mean, (low, high) = found["slowdown"]["mean"], found["slowdown"]["ci95"]
        left.bar(name, 100 * mean, yerr=[[100 * (mean - low)], [100 * (high - mean)]], capsize=4)
        for figure_name in ("harvest_ratio", "fill_efficiency"):
            if found.get(figure_name) is not None:
                right.bar(f"{name}\n{figure_name}", found[figure_name])
    left.set_ylabel("slowdown of the main job (%)")
    left.tick_params(axis="x", rotation=20)
    right.set_ylim(0, 1.1)
    figure.savefig(path, dpi=120)


def missing(options: argparse.Namespace) -> str:
    """Why it cannot run here; empty if it can."""
    import torch

    if not torch.cuda.is_available():
        return "no CUDA device"
    if "mps" in (options.sharing, *options.baselines) and shutil.which("nvidia-cuda-mps-control") is None:
        return "nvidia-cuda-mps-control is not installed; expected it, or --sharing timeslice --baselines timeslice"
    return ""


def bench(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    sharing = options.sharing
    for name, ways in (("filled", (sharing,)), ("colocated", tuple(options.baselines))):
        for way in ways:
            options.sharing = way
            inside = folder / f"{name}-{way}"
            inside.mkdir()
            with mps() if way == "mps" else nullcontext():
                if name == "filled":
                    summary |= {schedule: filled(inside, options, schedule) for schedule in options.schedules}
                else:
                    summary[f"without gates, {way}"] = colocated(inside, options)
    options.sharing = sharing
    import torch

    return {"device": torch.cuda.get_device_name(0), "options": vars(options), "summary": summary}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    parser.add_argument("--png", metavar="FILE", help="draw them here")
    parser.add_argument("--model", choices=MODELS, default="1.3b", help="(default: 1.3b)")
    parser.add_argument("--stages", type=int, default=4, help="pipeline stages, all on one GPU (default: 4)")
    parser.add_argument("--microbatches", type=int, default=8, help="per iteration (default: 8)")
    parser.add_argument("--schedules", nargs="+", choices=("1f1b", "interleaved"), default=["1f1b", "interleaved"])
    parser.add_argument("--sharing", choices=("mps", "timeslice"), default="timeslice", help="(default: timeslice)")
    parser.add_argument("--baselines", nargs="*", choices=("mps", "timeslice"), default=["mps", "timeslice"])
    parser.add_argument("--block", type=int, default=5, help="iterations per block (default: 5)")
    parser.add_argument("--pairs", type=int, default=12, help="pairs of blocks, on and off (default: 12)")
    parser.add_argument("--baseline-pairs", type=int, default=4, help="pairs for each baseline (default: 4)")
    parser.add_argument("--warmup", type=int, default=15, help="iterations before the first block (default: 15)")
    parser.add_argument("--extra", default="", help="more flags for Megatron, in one argument")
    parser.add_argument("--keep", metavar="DIR", help="keep logs and reports here")
    parser.add_argument("--drive", metavar="FILE", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.drive:
        drive(options.drive)
        return
    result: dict[str, Any]
    if reason := missing(options):
        print(f"bench_gpu: not run: {reason}")
        result = {"not_run": reason}
    else:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(options.keep or scratch).resolve()
            folder.mkdir(parents=True, exist_ok=True)
            try:
                result = bench(folder, options)
            except (RuntimeError, subprocess.SubprocessError) as error:
                sys.exit(f"bench_gpu: {error}")
        print(json.dumps(result["summary"], indent=2))
        if options.png:
            draw(result["summary"], Path(options.png))
    if options.json:
        command = "python scripts/bench_gpu.py " + " ".join(sys.argv[1:])
        Path(options.json).write_text(json.dumps({"command": command} | result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Has a change made filling dearer?  This tree and another commit, trained with the same jobs, in turn.

The other commit is checked out into a folder of its own and run with this tree's packages.  Each run measures its
slowdown in paired blocks and its harvest; what counts is the difference between two runs that follow each other, this
tree first and second in turn.

    python scripts/benchmarks/bench_against.py COMMIT --json docs/benchmarks/against.json
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from scripts.benchmarks.trainings import launcher, settings

ROOT = Path(__file__).resolve().parents[2]
MODEL = (
    "--pipeline-model-parallel-size 2 --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 "
    "--max-position-embeddings 256 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --lr-decay-style constant "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 255 --eval-iters 0 --eval-interval 100000 --log-interval 1"
)
JOBS = [
    *({"name": f"short-{number}", "task": "examples.tasks.factorization:MatrixFactorization",
       "args": {"epochs": 1}, "priority": 1} for number in range(4)),
    {"name": "pagerank", "task": "examples.tasks.pagerank:PageRank", "args": {"repeat": 0}},
    {"name": "factors", "task": "examples.tasks.factorization:MatrixFactorization", "args": {"epochs": 0}},
]  # fmt: skip
FIGURES = (
    *("slowdown", "harvest_ratio", "median_iteration_s", "p99_iteration_s", "first_iteration_s", "later_p99_s"),
    "start_s",
)
_TOOK = re.compile(r"elapsed time per iteration \(ms\): ([\d.]+)")


def train(tree: Path, folder: Path, iterations: int, block: int, warmup: int) -> dict[str, Any]:
    """One training of a tree; its figures, and how long each iteration took.

    Raises:
        RuntimeError: it failed; the message has the end of its output.
    """
    folder.mkdir()
    folder.chmod(0o755)  # the jobs run as a user without rights
    jobs = folder / "jobs.yaml"
    jobs.write_text(json.dumps({"jobs": JOBS}), encoding="utf-8")  # JSON is YAML
    flags = [
        *("--train-iters", str(iterations), "--fill-jobs", str(jobs), "--fill-report", str(folder / "run")),
        *("--fill-paired-blocks", str(block), *settings(warmup_iterations=warmup)),
    ]
    done = subprocess.run(
        [*launcher(2), str(tree / "pretrain_gpt.py"), *MODEL.split(), *flags],
        cwd=tree,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree), "PIPEFILL_CPU_BACKEND": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{tree} failed with status {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    report = json.loads((folder / "run" / "report.json").read_text(encoding="utf-8"))
    times = report["ranks"][0]["iteration_time"]
    starts = [(ready - started) / 1e9 for started, ready in _starts(folder / "run") if ready > started]
    iteration_ms = [float(took) for took in _TOOK.findall(done.stdout)]
    return {
        "slowdown": report["summary"]["slowdown"]["mean"],
        "harvest_ratio": report["summary"]["harvest_ratio"],
        "median_iteration_s": times["median_s"],
        "p99_iteration_s": times["p99_s"],
        "first_iteration_s": iteration_ms[0] / 1e3,
        "later_p99_s": float(np.percentile(iteration_ms[warmup:], 99)) / 1e3,
        "start_s": statistics.median(starts),
        "iteration_ms": iteration_ms,
    }


def _starts(run: Path) -> list[tuple[int, int]]:
    """When each worker was started, and when it called its task, however the commit lays its records out."""
    text = "".join(path.read_text(encoding="utf-8") for path in run.rglob("agent*.json*"))
    return [(int(one), int(two)) for one, two in re.findall(r'"started_ns": ?(\d+), ?"ready_ns": ?(\d+)', text)]


def compared(name: str, here: list[dict[str, Any]], there: list[dict[str, Any]]) -> dict[str, Any]:
    """The medians of a figure, and the mean difference of the pairs with a 95% bootstrap interval."""
    differences = np.array([one[name] - other[name] for one, other in zip(here, there, strict=True)])
    rng = np.random.default_rng(0)
    means = rng.choice(differences, (10_000, len(differences))).mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return {
        "here": round(statistics.median(one[name] for one in here), 4),
        "there": round(statistics.median(one[name] for one in there), 4),
        "difference": {"mean": round(float(differences.mean()), 4), "ci95": [round(low, 4), round(high, 4)]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="what to compare this tree with")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of trainings (default: 5)")
    parser.add_argument("--blocks", type=int, default=6, help="pairs of blocks in each (default: 6)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    options = parser.parse_args()
    block, warmup = 5, 15
    iterations = warmup + 2 * block * options.blocks
    figures: dict[str, list[dict[str, Any]]] = {"here": [], "there": []}
    with tempfile.TemporaryDirectory(prefix="pipefill-against-", dir="/var/tmp") as scratch:
        folder = Path(scratch)
        folder.chmod(0o755)
        other = folder / "tree"
        subprocess.run(
            ["git", "worktree", "add", "--quiet", "--detach", str(other), options.commit], cwd=ROOT, check=True
        )
        try:
            for number in range(options.pairs):
                order = [("here", ROOT), ("there", other)]
                for name, tree in order if number % 2 else reversed(order):
                    figures[name].append(train(tree, folder / f"{name}-{number}", iterations, block, warmup))
                    said = {figure: figures[name][-1][figure] for figure in FIGURES}
                    print(f"{number} {name}: {said}", file=sys.stderr, flush=True)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(other)], cwd=ROOT, check=True)
    result = {
        "command": "python scripts/benchmarks/bench_against.py " + " ".join(sys.argv[1:]),
        "pairs": options.pairs,
        "iterations": iterations,
        "summary": {name: compared(name, figures["here"], figures["there"]) for name in FIGURES},
        "runs": figures,
    }
    print(json.dumps(result["summary"], indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Does the simulator say what really happens?  Real trainings in two stages, and what it predicts of them.

Six trainings of a small GPT on two ranks: GPipe, 1F1B and interleaved, each with two pairs of side tasks.  Filling is
on and off in turn, in short blocks, so that what drifts in the machine is in both.  What is predicted, and how, is in
``scripts/benchmarks/studies/truth/compare.py``.  The noise is shown beside the errors: how far a prediction could be
expected to be off (95%) that is perfect but made from other iterations, as neighbouring blocks differ; the 95%
bootstrap interval of what was measured; and by how much the blocks of one half differ from those of the other.

    python scripts/benchmarks/sim_truth.py --keep runs --json truth.json
    python scripts/benchmarks/sim_truth.py --from runs --json truth.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron.fill.app.listening import fill_rule
from megatron.fill.config import FillSettings
from scripts.benchmarks.studies.truth.compare import RUN, Figure, compare, load
from scripts.benchmarks.studies.truth.table import summary, table
from scripts.benchmarks.trainings import launcher, settings

ROOT = Path(__file__).resolve().parents[2]
STAGES, MICROBATCHES, CHUNKS, LAYERS = 2, 4, 2, 4
WARMUP = 30  # iterations before the first block: the jobs set themselves up meanwhile
MODEL = (
    f"--pipeline-model-parallel-size {STAGES} --num-layers {LAYERS} --hidden-size 256 --num-attention-heads 4",
    "--seq-length 128 --max-position-embeddings 128 --micro-batch-size 2",
    f"--global-batch-size {2 * MICROBATCHES} --lr 1e-3 --lr-decay-style constant --mock-data",
    "--tokenizer-type NullTokenizer --vocab-size 255 --eval-iters 0 --eval-interval 100000 --log-interval 50",
)
SCHEDULES = {
    "gpipe": "--fill-pipeline-schedule gpipe",
    "1f1b": "",
    "interleaved": f"--num-layers-per-virtual-pipeline-stage {LAYERS // STAGES // CHUNKS}",
}
MIXES: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "digits+pagerank": {
        "digits": ("examples.tasks.digits:DigitsTraining", {"epochs": 0}),
        "pagerank": ("examples.tasks.pagerank:PageRank", {"repeat": 0}),
    },
    "factors+images": {
        "factors": ("examples.tasks.factorization:MatrixFactorization", {"epochs": 0}),
        "images": ("examples.tasks.images:ImageResize", {"repeat": 0}),
    },
}


def train(folder: Path, schedule: str, mix: str, iterations: int, blocks: int) -> None:
    """Make one training; its records lie in ``folder``.

    Raises:
        RuntimeError: it failed; the message has the end of its output.  Or there is such a folder already.
    """
    if folder.exists():
        raise RuntimeError(f"{folder} is there already; expected a new folder, or --from to compare what is in it")
    folder.mkdir(parents=True)
    jobs = folder / "jobs.yaml"
    entries = [{"name": name, "task": task, "args": args} for name, (task, args) in MIXES[mix].items()]
    jobs.write_text(json.dumps({"jobs": entries}), encoding="utf-8")  # JSON is YAML
    flags = f"{' '.join(MODEL)} {SCHEDULES[schedule]} --train-iters {iterations}"
    fill = ["--fill-paired-blocks", str(blocks), "--fill-max-slowdown", "0"]
    fill += settings(warmup_iterations=WARMUP, trace_iterations=iterations)
    command = [*launcher(STAGES), "pretrain_gpt.py", *flags.split(), *fill]
    command += ["--fill-jobs", str(jobs), "--fill-report", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
    (folder / "train.log").write_text(done.stdout + done.stderr, encoding="utf-8")
    if done.returncode:
        raise RuntimeError(f"{schedule}, {mix}: status {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    rule = fill_rule(FillSettings(warmup_iterations=WARMUP), STAGES)
    what = {"rule": asdict(rule), "command": command}
    (folder / RUN).write_text(json.dumps(what) + "\n", encoding="utf-8")


def truth(folder: Path, iterations: int | None, blocks: int, only: Sequence[str] = ()) -> dict[str, list[Figure]]:
    """Make the trainings (``iterations`` None: take those in ``folder``) and compare.

    Args:
        only: names such as ``1f1b, digits+pagerank``; empty for all.
    """
    results = {}
    for schedule in SCHEDULES:
        for mix in MIXES:
            name = f"{schedule}, {mix}"
            if only and name not in only:
                continue
            run = _of(folder, name)
            if iterations is not None:
                train(run, schedule, mix, iterations, blocks)
            if run.exists():
                results[name] = compare(load(run))
    return results


def study(folder: Path, iterations: int | None, blocks: int, only: Sequence[str] = ()) -> dict[str, Any]:
    """``truth``, printed, and as JSON data."""
    results = truth(folder, iterations, blocks, only)
    print(table(results))
    trainings = {}
    for name in results:
        said = json.loads((_of(folder, name) / "report.json").read_text(encoding="utf-8"))["summary"]
        trainings[name] = {what: said[what] for what in ("iterations", "bubble_share", "harvest_ratio", "slowdown")}
        print(f"{name}: harvest ratio {said['harvest_ratio']:.3f}, slowdown {said['slowdown']['mean']:+.1%}")
    runs = {name: [asdict(figure) for figure in figures] for name, figures in results.items()}
    return {"summary": summary(results), "trainings": trainings, "runs": runs}


def _of(folder: Path, name: str) -> Path:
    return folder / name.replace(", ", "-")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    parser.add_argument("--keep", metavar="DIR", help="keep the trainings' records here")
    parser.add_argument("--from", metavar="DIR", dest="given", help="compare the trainings kept here; make none")
    parser.add_argument("--iterations", type=int, default=300, help="of each training (default: 300)")
    parser.add_argument("--block", type=int, default=1, help="iterations per block (default: 1)")
    parser.add_argument("--only", action="append", default=[], metavar="RUN", help='such as "1f1b, factors+images"')
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.given or options.keep or scratch).resolve()
        iterations = None if options.given else options.iterations
        found = study(folder, iterations, options.block, options.only)
    print(json.dumps(found["summary"], indent=2))
    if options.json:
        content = {"command": "python scripts/benchmarks/sim_truth.py " + " ".join(sys.argv[1:]), **found}
        Path(options.json).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

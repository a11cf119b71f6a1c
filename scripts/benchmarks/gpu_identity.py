"""Do losses stay the same, to the bit, when jobs run in the bubbles of real stages that share one GPU?

Trains with a side task of matrix products in every stage's bubbles, until all of them have run steps, and as many
iterations without any, and compares the losses of every iteration.  Both have the same ``--train-iters``, by which
Megatron shuffles the data.  The transfers go through the host over gloo.
Without a GPU, or with --device cpu, the same runs small on the CPU.

    python scripts/benchmarks/gpu_identity.py --schedule interleaved --json identity.json

Exit code: 0 if they are the same, 1 if they are not or a training failed, 2 for a wrong flag.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from megatron.fill.store import open_store
from scripts.benchmarks.gpu_day import device as device_here
from scripts.benchmarks.gpu_models import model_flags
from scripts.benchmarks.gpu_parts import END_S, START_S
from scripts.benchmarks.harness import arguments, command
from scripts.benchmarks.one_gpu import mps, training
from scripts.benchmarks.trainings import losses, settings

_MOST_ITERATIONS = 100_000
MODELS = {"cpu": ("tiny", 192), "cuda": ("350m", 4096)}  # the model, and the size of the job's matrices
_TIMEOUT_MINUTES = 2
_MORE = 15  # iterations after all jobs have run a step
_SPARE_S = 30.0  # for a training that ends late


def least_s(options: argparse.Namespace, pace_s: float) -> float:
    """The least seconds of both trainings where jobs need all the time that they have, and an iteration ``pace_s``."""
    return 2 * (START_S + max(options.iterations * pace_s, options.most_seconds) + _MORE * pace_s + END_S)


def compare(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Both trainings; what came of them.

    Raises:
        RuntimeError: one failed.
    """
    model, size = MODELS[options.device]
    stages = options.stages
    flags = model_flags(model, options.device, stages, options.microbatches, options.schedule, _TIMEOUT_MINUTES)
    flags += ["--tensorboard-log-interval", "1", "--num-workers", "2"]  # Megatron's default, but on the CPU backend
    jobs = folder / "jobs.json"
    job = {"task": "scripts.benchmarks.gpu_task:Products", "args": {"size": size}, "memory": "4GiB"}
    entries = [{"name": f"products{at}"} | job for at in range(stages)]
    jobs.write_text(json.dumps({"jobs": entries}), encoding="utf-8")  # JSON is YAML
    filling = ["--fill-jobs", str(jobs), "--fill-report", str(folder / "run"), "--fill-max-slowdown", "0"]
    filling += [*settings(warmup_iterations=3), "--fill-sharing", options.sharing]
    awaited = Awaited(folder / "run", options.iterations, options.most_seconds, more=_MORE)
    found: dict[str, dict[int, float]] = {}
    most_s = START_S + options.most_seconds + _SPARE_S + END_S
    for name in ("with", "without"):
        where, enough = folder / name, awaited if name == "with" else None
        extra = filling if enough else ["--exit-interval", str(len(found["with"]))]
        extra = [*extra, "--train-iters", str(_MOST_ITERATIONS), "--tensorboard-dir", str(where)]
        with training(stages, options.sharing, [*flags, *extra], folder / f"{name}.log", most_s, enough):
            pass
        if not awaited.stepped:
            raise RuntimeError(f"not every stage's job ran a step within {options.most_seconds:g} s")
        found[name] = losses(where)
    summary = json.loads((folder / "run" / "report.json").read_text(encoding="utf-8"))["summary"]
    return verdict(found["with"], found["without"]) | {"harvest_ratio": summary["harvest_ratio"]}


class Awaited:
    """Told every line of a training: whether it has gone on for long enough.

    Args:
        run: its run folder, in which its job store is.
        iterations: at least so many.
        more: and so many after all jobs were seen to have run a step.
        most_s: seconds from its first iteration, after which it is to end though some job has not run a step.
    """

    def __init__(self, run: Path, iterations: int, most_s: float, more: int = 0) -> None:
        self._store = run / "jobs.db"
        self._iterations = iterations
        self._most_s = most_s
        self._end_s = math.inf
        self._seen = 0
        self._more = more
        self.stepped = False

    def __call__(self, line: str) -> bool:
        if not re.search(r" iteration +\d+/", line):
            return False
        if not self._seen:
            self._end_s = time.monotonic() + self._most_s
        self._seen += 1
        self._more -= self.stepped
        self.stepped = self.stepped or self._all_stepped()
        done = self._seen >= self._iterations and self._more <= 0
        return (self.stepped and done) or time.monotonic() > self._end_s

    def _all_stepped(self) -> bool:
        if not self._store.exists():
            return False
        store = open_store(self._store)
        try:
            jobs = store.list()
        finally:
            store.close()
        return bool(jobs) and all(job.progress.steps for job in jobs)


def verdict(filled: dict[int, float], plain: dict[int, float]) -> dict[str, Any]:
    """Whether the losses of every iteration are the same, and are numbers."""
    differing = sorted(one for one in filled.keys() | plain.keys() if filled.get(one) != plain.get(one))
    return {
        "iterations": len(plain),
        "identical": bool(plain) and not differing,
        "first_that_differs": differing[0] if differing else None,
        "finite": all(math.isfinite(loss) for loss in plain.values()),
        "losses": list(plain.values()),
    }


def parsed(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = arguments(__doc__)
    parser.add_argument("--keep", metavar="DIR", help="keep logs, records and the report here")
    parser.add_argument("--device", choices=MODELS, help="(default: the GPU, where there is one)")
    parser.add_argument("--stages", type=int, choices=(2, 4), default=2, help="on the one device (default: 2)")
    parser.add_argument("--microbatches", type=int, choices=(4, 8, 16), default=4, help="per iteration (default: 4)")
    parser.add_argument("--schedule", choices=("1f1b", "interleaved"), default="1f1b")
    parser.add_argument("--sharing", choices=("mps", "timeslice"), default="timeslice")
    parser.add_argument("--iterations", type=int, default=40, help="at least (default: 40)")
    parser.add_argument(
        "--most-seconds",
        type=float,
        default=120.0,
        help="from the first iteration, for all jobs to run a step (default: 120)",
    )
    options = parser.parse_args(given)
    if not 5 <= options.iterations <= 10_000:
        parser.error(f"argument --iterations: {options.iterations}: expected 5 to 10000")
    if not options.most_seconds > 0:
        parser.error(f"argument --most-seconds: {options.most_seconds:g}: expected above 0")
    options.device = options.device or device_here()
    if options.device == "cpu" and options.sharing == "mps":
        parser.error("argument --sharing: mps needs a GPU; expected timeslice")
    return options


def main() -> None:
    options = parsed()
    if options.device == "cpu":
        os.environ |= {"PIPEFILL_CPU_BACKEND": "1", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.keep or scratch).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with mps(folder / "mps") if options.sharing == "mps" else nullcontext():
                found = compare(folder, options)
        except RuntimeError as error:
            sys.exit(f"gpu_identity: {error}")
    if options.json is not None:
        options.json.write_text(json.dumps({"command": command(), "device": options.device} | found, indent=2) + "\n")
    print(f"losses of {found['iterations']} iterations: " + ("the same" if found["identical"] else "NOT the same"))
    sys.exit(not (found["identical"] and found["finite"]))


if __name__ == "__main__":
    main()

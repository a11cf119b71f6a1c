"""What --fill-free-waits brings and costs: a training of two real stages with the flag and without, in turns.

Each stage has a GPU of its own and the stages send over NCCL, with a side task of matrix products in every stage's
bubbles; the orders of neighbouring pairs are opposite, so that a drift cancels.  What counts begins once both jobs
have stepped.  It needs two GPUs: on one, NCCL refuses two ranks, and the flag refuses transfers through the host.

    python scripts/benchmarks/gpu_free_waits.py --pairs 4 --json free-waits.json

Exit code: 0, also where there is nothing to run it on, 1 if a training failed, 2 for a wrong flag.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from megatron.fill.records.segment import last_segment
from scripts.benchmarks.gpu_identity import Awaited
from scripts.benchmarks.gpu_models import model_flags
from scripts.benchmarks.gpu_parts import END_S, START_S
from scripts.benchmarks.harness import arguments, check_above_zero, command
from scripts.benchmarks.one_gpu import on_gpus
from scripts.benchmarks.trainings import settings

STAGES = 2
WARMUP, MEASURED = 5, 20  # iterations
FLAG = "--fill-free-waits"
_TIMEOUT_MINUTES = 2


def least_s(options: argparse.Namespace, pace_s: float) -> float:
    """The least seconds that it takes, where an iteration takes ``pace_s``."""
    return 2 * options.pairs * (START_S + options.startup_seconds + (WARMUP + MEASURED) * pace_s + END_S)


def order(pairs: int) -> list[bool]:
    """Whether each training has the flag."""
    return [on for pair in range(pairs) for on in ((True, False) if pair % 2 == 0 else (False, True))]


def train(folder: Path, options: argparse.Namespace, on: bool, end_s: float) -> dict[str, Any]:
    """One training; its figures.

    Raises:
        RuntimeError: it failed, or no job stepped early enough.
    """
    folder.mkdir(parents=True)
    job = {"task": "scripts.benchmarks.gpu_task:Products", "args": {"size": 4096}, "memory": "4GiB"}
    jobs = folder / "jobs.json"
    entries = [{"name": f"products{at}"} | job for at in range(STAGES)]
    jobs.write_text(json.dumps({"jobs": entries}), encoding="utf-8")  # JSON is YAML
    run = folder / "run"
    flags = model_flags(options.model, "cuda", STAGES, 8, "1f1b", _TIMEOUT_MINUTES)
    flags += ["--train-iters", "100000", "--fill-jobs", str(jobs), "--fill-report", str(run)]
    flags += [*settings(warmup_iterations=WARMUP), "--fill-max-slowdown", "0", "--fill-sharing", "timeslice"]
    log = folder / "training.log"
    left_s = max(1.0, end_s - time.monotonic())
    enough = Awaited(run, WARMUP + MEASURED, left_s, more=MEASURED)
    with on_gpus(STAGES, [*flags, *([FLAG] if on else [])], log, left_s, enough) as lines:
        said = "".join(lines)
    if on and "cannot be had" in said:
        raise RuntimeError(next(line for line in said.splitlines() if "cannot be had" in line))
    return figures(run)


def figures(run: Path) -> dict[str, Any]:
    """Of the iterations after jobs had settled.

    Raises:
        RuntimeError: there are too few.
    """
    report = json.loads((run / "report.json").read_text(encoding="utf-8"))
    times: list[float] = []
    for record in last_segment(run).records():
        counted = [one for one in record.iterations if one.iteration > max(WARMUP, record.settled_after)]
        if len(counted) < MEASURED // 2 or not record.settled_after:
            raise RuntimeError(
                f"{len(counted)} iterations after all jobs had stepped; expected {MEASURED // 2} or more"
            )
        times.append(median(one.end_ns - one.start_ns for one in counted) / 1e6)
    return {"iteration_ms": fmean(times), "harvest_ratio": report["summary"]["harvest_ratio"]}


def compared(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The pairs: how much longer an iteration is with the flag, and the harvests.

    Args:
        found: of each training in their order, with ``free_waits``.
    """
    pairs = [sorted(found[at : at + 2], key=lambda one: not one["free_waits"]) for at in range(0, len(found), 2)]
    return {
        "pairs": len(pairs),
        "slowdown_by_pair": [on["iteration_ms"] / off["iteration_ms"] - 1 for on, off in pairs],
        "harvest_with": fmean(on["harvest_ratio"] for on, _ in pairs),
        "harvest_without": fmean(off["harvest_ratio"] for _, off in pairs),
        "trainings": found,
    }


def why_not() -> str:
    """Why it cannot be run here; empty if it can."""
    import torch

    gpus = torch.cuda.device_count()
    return "" if gpus >= STAGES else f"two real stages over NCCL need two GPUs; there are {gpus}"


def parsed(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = arguments(__doc__)
    parser.add_argument("--keep", metavar="DIR", help="keep logs, records and reports here, in an empty folder")
    parser.add_argument("--model", choices=("350m", "1.3b"), default="350m", help="(default: 350m)")
    parser.add_argument("--pairs", type=int, default=1, help="of trainings with the flag and without (default: 1)")
    parser.add_argument(
        "--startup-seconds",
        type=float,
        default=10.0,
        help="that jobs take to their first step, of which the predicted time has that much (default: 10)",
    )
    parser.add_argument("--budget-seconds", type=float, default=600.0, help="for all of it (default: 600)")
    options = parser.parse_args(given)
    check_above_zero(parser, options, "pairs", "startup_seconds", "budget_seconds")
    return options


def main() -> None:
    options = parsed()
    end_s = time.monotonic() + options.budget_seconds
    content: dict[str, Any] = {"command": command()}
    if lacking := why_not():
        print(f"not run: {lacking}")
        content["not_run"] = lacking
    else:
        found: list[dict[str, Any]] = []
        with tempfile.TemporaryDirectory() as scratch:
            Path(scratch).chmod(0o755)  # jobs run as another user
            folder = Path(options.keep or scratch).resolve()
            for at, on in enumerate(order(options.pairs)):
                try:
                    found.append({"free_waits": on} | train(folder / str(at), options, on, end_s))
                except RuntimeError as error:
                    sys.exit(f"gpu_free_waits: {error}")
                print(found[-1], flush=True)
        content |= compared(found)
    if options.json is not None:
        options.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""What filling costs and gains on a GPU: one real stage of a pipeline that owns the GPU, beside ghost stages.

The other stages are played from their schedule's timeline (``pipefill_patches.ghosts``), so a bubble is time in which
this stage waits and the GPU is idle, as in the whole job; several real stages on one GPU would fill each other's. A
BERT training runs in the bubbles. A call measures one variant: how jobs share the GPU, how ghosts wait, the schedule,
the model and the guard. Its parts:

* ``profile``: the job alone, into a store, so that it is not measured in bubbles, and the pace of the training;
* ``bubbles``: without jobs, whether bubbles are as long as the ghosts wait;
* ``filled``: slowdown in pairs of blocks, harvest ratio, fill efficiency (work per second of bubble against work per
  second alone, after the training, on the same device), bubble to first step, overruns and their share of the bubbles,
  the bubbles' lengths with and without filling, the least memory that was free;
* ``identity``: whether the weights are the same to the bit with jobs and without;
* ``no-gate``: the slowdown by the same task beside the training without gates;
* ``marks``: what watching costs without jobs.

    python scripts/benchmarks/bench_gpu.py --json gpu.json --sharing mps --parts profile filled --budget-seconds 500

--json is written after every part; what it has of other parts and variants is kept.  ``--device cpu`` is a rehearsal,
small and over the CPU backend: its variants are called so, and none of its figures is a GPU's.

Exit code: 0 when it measured, and also where there is no GPU: the file holds ``not_run`` with the reason.  1 when a
part failed (the others are in the file), 2 for a wrong flag.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from megatron.fill.errors import ConfigError
from megatron.fill.given.quantities import parse_bytes
from scripts.benchmarks.gpu_models import MODELS
from scripts.benchmarks.gpu_parts import PARTS, Bench
from scripts.benchmarks.harness import Results, opened
from scripts.benchmarks.one_gpu import mps

_LEAST_S = 5.0  # of the budget, to begin a part
_LONGEST = 2000  # characters of an error that are kept


def variant(options: argparse.Namespace, device: str) -> str:
    shared = options.sharing if device == "cuda" else "cpu-rehearsal"
    guard = "" if options.guard_us is None else f"-guard{options.guard_us:g}us"
    return f"{shared}-{options.waits}-{options.schedule}-{options.model}{guard}"


def bench(folder: Path, options: argparse.Namespace, device: str, results: Results) -> bool:
    """Measure the parts; each is written down as soon as it is known.  Whether all went well."""
    ends = time.monotonic() + options.budget_seconds if options.budget_seconds else None

    def left_s() -> float | None:
        return None if ends is None else ends - time.monotonic()

    name, well = variant(options, device), True
    results.summary.pop("not_run", None)  # of an earlier call
    inside = folder / name
    inside.mkdir(parents=True, exist_ok=True)
    for part in options.parts:
        left = left_s()
        if left is not None and left < _LEAST_S:
            figures: dict[str, Any] = {"not_run": f"the budget of {options.budget_seconds:g} s is spent"}
        else:
            print(f"bench_gpu: {part}, {name}", flush=True)
            begun = time.monotonic()
            try:
                with mps(inside / "mps") if options.sharing == "mps" else nullcontext():
                    figures = PARTS[part](Bench(options, device, inside, left_s))
                well = well and "failed" not in figures
            except Exception as error:  # the other parts are worth as much
                figures, well = {"failed": f"{type(error).__name__}: {error}"[-_LONGEST:]}, False
            figures["wall_s"] = round(time.monotonic() - begun, 1)
        results.summary.get(part, {}).pop(name, None)  # of an earlier call
        results.add(f"{part}/{name}", figures, part, name)
        print(json.dumps({part: figures}, indent=2), flush=True)
    return well


def missing(options: argparse.Namespace) -> str:
    """Why it cannot run here; empty if it can."""
    import torch

    if not torch.cuda.is_available():
        return "no CUDA device"
    if options.sharing == "mps" and shutil.which("nvidia-cuda-mps-control") is None:
        return "nvidia-cuda-mps-control is not installed; expected it, or --sharing timeslice"
    return ""


def parsed() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures here")
    parser.add_argument("--keep", metavar="DIR", help="keep logs, reports and the job's profile here")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], help="(default: all)")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto", help="cpu: a rehearsal (default: auto)")
    parser.add_argument("--sharing", choices=("timeslice", "mps"), default="timeslice", help="(default: timeslice)")
    parser.add_argument("--waits", choices=("stream", "host"), help="of ghosts (default: stream; host on the CPU)")
    parser.add_argument("--schedule", choices=("1f1b", "interleaved"), default="1f1b", help="(default: 1f1b)")
    parser.add_argument("--guard-us", type=float, metavar="US", help="guard_us (default: PipeFill's own)")
    parser.add_argument("--model", choices=MODELS, help="(default: 1.3b; tiny on the CPU)")
    parser.add_argument("--stages", type=int, default=4, help="of the pipeline (default: 4)")
    parser.add_argument("--stage", type=int, default=0, help="which is real, from 0 (default: 0)")
    parser.add_argument("--microbatches", type=int, default=8, help="per iteration (default: 8)")
    parser.add_argument("--warmup", type=int, default=15, help="iterations before anything is filled (default: 15)")
    parser.add_argument(
        "--startup-seconds", type=float, default=30.0, help="for jobs to settle, before blocks count (default: 30)"
    )
    parser.add_argument("--block", type=int, default=5, help="iterations per block (default: 5)")
    parser.add_argument("--pairs", type=int, default=10, help="pairs of blocks, on and off (default: 10)")
    parser.add_argument("--baseline-seconds", type=float, default=8.0, help="the job alone, at the end (default: 8)")
    parser.add_argument("--memory", default="8GiB", help="the job's limit (default: 8GiB)")
    parser.add_argument("--budget-seconds", type=float, default=0.0, metavar="S", help="for all parts (0: no limit)")
    parser.add_argument("--distributed-timeout-minutes", type=int, default=2, metavar="M", help="(default: 2)")
    parser.add_argument("--extra", default="", help="more flags for Megatron, in one argument")
    return parser, parser.parse_args()


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse what cannot be measured, and fill in what depends on the device."""
    for flag, least in (("warmup", 1), ("block", 1), ("pairs", 1), ("stages", 2), ("distributed_timeout_minutes", 1)):
        if getattr(options, flag) < least:
            parser.error(f"--{flag.replace('_', '-')} is {getattr(options, flag)}: expected at least {least}")
    for flag, most in (
        ("startup_seconds", 3600),
        ("baseline_seconds", 600),
        ("budget_seconds", 1e6),
        ("guard_us", 1e9),
    ):
        value = getattr(options, flag)
        if value is not None and not 0 <= value <= most:
            parser.error(f"--{flag.replace('_', '-')} is {value:g}: expected 0 to {most:g}")
    if not 0 <= options.stage < options.stages:
        parser.error(f"--stage is {options.stage}: expected 0 to {options.stages - 1}")
    if options.microbatches < 1 or options.microbatches % options.stages:
        parser.error(f"--microbatches is {options.microbatches}: expected a multiple of --stages, {options.stages}")
    cpu = options.device == "cpu"
    options.model = options.model or ("tiny" if cpu else "1.3b")
    layers, chunks = MODELS[options.model][0], 2 if options.schedule == "interleaved" else 1
    if layers % (chunks * options.stages):
        parser.error(f"--stages is {options.stages}: expected stages that share {layers} layers evenly ({chunks} each)")
    try:
        parse_bytes(options.memory)
    except (ValueError, ConfigError) as error:
        parser.error(f"--memory is {options.memory!r}: {error}")
    if cpu and (options.sharing == "mps" or options.waits == "stream"):
        parser.error("--device cpu has no MPS and no streams: expected --sharing timeslice and --waits host")
    options.waits = options.waits or ("host" if cpu else "stream")


def main() -> None:
    parser, options = parsed()
    check(parser, options)
    results = opened(parser, options.json)
    if options.device == "cpu":
        os.environ["PIPEFILL_CPU_BACKEND"] = "1"
    elif reason := missing(options):
        print(f"bench_gpu: not run: {reason}")
        results.summary["not_run"] = reason
        results.write()
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended too
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.keep or scratch).resolve()
        sys.exit(not bench(folder, options, "cpu" if options.device == "cpu" else "cuda", results))


if __name__ == "__main__":
    main()

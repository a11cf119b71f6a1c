"""What a GPU does to bubbles, measured with two processes and without any training.

* ``marks``: what a mark in the stream costs, how long until the relay has heard of it, and until the first kernel of a
  worker that waited at the gate is done
* ``spinning``: what is left of a worker's matrix products beside a rank that waits in a kernel, as NCCL's receives do
* ``slices``: how long a rank's smallest kernel takes beside a worker's kernels of 5 ms
* ``memory``: what a context takes, whether the driver names our processes, which limits bind, also behind Landlock
* ``killing``: what a rank feels of a worker that is killed in the middle of a kernel

Each time-sliced, and under MPS where that can be had.

    python scripts/benchmarks/gpu_micro.py --json micro.json

Exit code: 0 when it measured, and where there is no GPU: it says so in one line, and the JSON file holds only
``not_run`` with the reason.  1 when a part failed (the others are measured all the same), 2 for a wrong flag.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from megatron.fill.device.nvml import Gpu, Nvml, uuid_of
from megatron.fill.device.port import DeviceError
from scripts.benchmarks.micro.actor import ActorError, serve
from scripts.benchmarks.micro.parts import PARTS
from scripts.benchmarks.micro.stage import Stage, opened


def measure(stage: Stage, parts: list[str], seconds: float, count: int, path: Path | None, head: dict[str, Any]) -> int:
    """Measure, and write what there is after each part; how many failed."""
    found: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for part in parts:
        start_s = time.monotonic()
        try:
            found[part] = PARTS[part](stage, seconds, count) | {"took_s": round(time.monotonic() - start_s, 1)}
            print(f"{part}: {json.dumps(found[part])}", flush=True)
        except (ActorError, DeviceError, OSError, ValueError) as error:
            failed[part] = str(error)
            print(f"{part}: failed: {error}", flush=True)
        write(path, head | {"no_mps": stage.no_mps, "parts": found, "failed": failed})
    return len(failed)


def write(path: Path | None, content: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def first_gpu() -> tuple[Nvml, Gpu]:
    """The GPU that CUDA calls number 0.

    Raises:
        DeviceError: there is none.
    """
    nvml = Nvml()
    gpus = nvml.gpus()
    uuid = uuid_of("cuda:0", os.environ.get("CUDA_VISIBLE_DEVICES") or None, gpus)
    return nvml, next(gpu for gpu in gpus if gpu.uuid == uuid)


def act() -> None:
    """Be one of the processes of the measurement."""
    from scripts.benchmarks.micro.accelerator import Cuda
    from scripts.benchmarks.micro.actions import Actions

    serve(Actions(Cuda))


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures here, after every part")
    parser.add_argument("--keep", metavar="DIR", type=Path, help="keep the logs of both processes and of MPS here")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="(default: all)")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each load (default: 2)")
    parser.add_argument("--marks", type=int, default=200, help="bubbles that are marked (default: 200)")
    parser.add_argument("--actor", action="store_true", help=argparse.SUPPRESS)
    return parser


def main() -> None:
    parser = command_line()
    options = parser.parse_args()
    if options.actor:
        act()
        return
    if not 0.1 <= options.seconds <= 60:
        parser.error(f"argument --seconds: {options.seconds:g}: expected 0.1 to 60")
    if not 1 <= options.marks <= 100_000:
        parser.error(f"argument --marks: {options.marks}: expected 1 to 100000")
    head: dict[str, Any] = {"command": " ".join(["python", "scripts/benchmarks/gpu_micro.py", *sys.argv[1:]])}
    try:
        write(options.json, head)  # before anything is measured for nothing
    except OSError as error:
        parser.error(f"argument --json: {options.json}: {error.strerror}; expected a file that can be written")
    try:
        nvml, gpu = first_gpu()
    except DeviceError as error:
        print(f"gpu_micro: not run: no GPU: {error}")
        write(options.json, head | {"not_run": f"no GPU: {error}"})
        return
    head |= {"device": gpu.name, "driver": nvml.driver()}
    with opened(nvml, gpu.uuid, keep=options.keep) as stage:
        failed = measure(stage, options.parts, options.seconds, options.marks, options.json, head)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

"""Stands in for a training under SLURM, in a blink: it counts, saves at SIGUSR2 as Megatron does, and goes on later.

    standin.py STEPS [--slow-helper] [--deaf-seconds S]

Rank 0 appends to ``log.jsonl`` where it was started: what it was given, and how it ended.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR")


def _helper(ready: int) -> None:
    """Like a rank's warden: told to end, it takes a while for what it has to save."""
    ended = False

    def end(number: int, frame: object) -> None:
        nonlocal ended
        ended = True

    signal.signal(signal.SIGTERM, end)
    os.write(ready, b"x")
    while not ended and os.getppid() != 1 and not Path("helper-ends").exists():
        time.sleep(0.05)
    time.sleep(2)
    Path("helper-saved").write_text("all of it")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("--slow-helper", action="store_true")
    parser.add_argument("--deaf-seconds", type=float, default=0.0)
    args = parser.parse_args()
    rank = int(os.environ["RANK"])
    told: dict[str, Any] = {name: os.environ[name] for name in _NAMES} | {"MASTER_PORT": os.environ["MASTER_PORT"]}
    told |= {"cpus": sorted(os.sched_getaffinity(0)), "restarts": os.environ.get("SLURM_RESTART_COUNT", "0")}
    told |= {"job": os.environ["SLURM_JOB_ID"]}
    with Path(f"rank{rank}.jsonl").open("a") as log:
        log.write(json.dumps(told) + "\n")
    time.sleep(args.deaf_seconds)
    stop = False

    def on_notice(number: int, frame: object) -> None:
        nonlocal stop
        stop = True

    signal.signal(signal.SIGUSR2, on_notice)
    if args.slow_helper and rank == 0:
        reader, writer = os.pipe()
        if os.fork() == 0:
            _helper(writer)
            os._exit(0)
        os.read(reader, 1)
    saved = Path(f"saved{rank}")
    done = int(saved.read_text()) if saved.exists() else 0
    while done < args.steps and not stop:
        done += 1
        time.sleep(0.1)
    saved.write_text(str(done))


if __name__ == "__main__":
    main()

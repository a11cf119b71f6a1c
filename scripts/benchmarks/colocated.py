"""Side tasks on the cores of a training, in the benchmark's own session and without PipeFill's runtime."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.benchmarks.sidetasks import TASKS, started
from scripts.benchmarks.trainings import Blocks, command, iterations_of, slowdown_of, training


def colocated(folder: Path, name: str, idle: bool, blocks: Blocks) -> dict[str, Any]:
    """Train while tasks run beside it, ungated, continued and stopped in blocks; the slowdown."""
    run_dir = folder / f"{name}-run"
    arguments = command(blocks.iterations, folder / name, ["pretrain_gpt.py"], "--fill-report", str(run_dir))
    cores = sorted(os.sched_getaffinity(0))[:2]
    workers = [
        subprocess.Popen([sys.executable, __file__, task, str(core), *["idle"] * idle])
        for task, core in zip(TASKS, cores, strict=True)
    ]
    time.sleep(10)  # until they are set up
    try:
        for worker in workers:
            worker.send_signal(signal.SIGSTOP)
        with training(arguments, folder / f"{name}.log") as process:
            assert process.stdout is not None
            for line in process.stdout:
                seen = re.search(r"iteration +(\d+)/", line)
                if seen:
                    on = blocks.fills(int(seen[1]) + 1)
                    for worker in workers:
                        worker.send_signal(signal.SIGCONT if on else signal.SIGSTOP)
                    if int(seen[1]) == blocks.iterations:
                        break
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    return slowdown_of(blocks.mark(iterations_of(run_dir)))


def drive(name: str, core: int, idle: bool) -> None:
    """Run a side task's steps for ever."""
    with started(*TASKS[name], core, idle=idle) as task:
        while True:
            task.run_next_step()


if __name__ == "__main__":
    drive(sys.argv[1], int(sys.argv[2]), sys.argv[3:] == ["idle"])

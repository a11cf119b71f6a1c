"""A side task beside a training with nothing between them, switched on and off: the baseline of bench_gpu.py.

python scripts/benchmarks/gpu_ungated.py JOB SWITCH
"""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from megatron.fill.sidetask.base import TaskContext
from megatron.fill.sidetask.loader import load_task
from scripts.benchmarks.one_gpu import end
from scripts.benchmarks.trainings import Blocks

_STOPPED, _RUNNING, _OVER = range(3)
_READY = "ready\n"


@contextmanager
def beside_the_training(
    job: dict[str, Any], device: str, folder: Path, blocks: Blocks
) -> Iterator[Callable[[int], None]]:
    """A process with the job, set up; yields what has it run or stand still, as the block of an iteration says.

    Raises:
        RuntimeError: it does not get ready.
    """
    switch, file = folder / "switch", folder / "ungated.json"
    switch.write_bytes(bytes([_STOPPED]))
    file.write_text(json.dumps(job | {"device": "cuda:0" if device == "cuda" else "cpu"}), encoding="utf-8")
    command = [sys.executable, __file__, str(file), str(switch)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        if process.stdout.readline() != _READY:
            raise RuntimeError(f"the task without gates ended with {process.wait()}")
        yield lambda iteration: _put(switch, _RUNNING if blocks.fills(iteration) else _STOPPED)
    finally:
        _put(switch, _OVER)
        with suppress(subprocess.TimeoutExpired):  # a client of MPS should end by itself, with no work outstanding
            process.wait(30)
        end([process])


def _put(switch: Path, state: int) -> None:
    with switch.open("r+b") as file:  # in place: the process has it mapped
        file.write(bytes([state]))


def drive(job: dict[str, Any], switch: Path) -> None:
    """Run the task while the first byte of ``switch`` says so."""
    import torch

    settle = torch.cuda.synchronize if job["device"] != "cpu" else lambda: None
    task = load_task(job["task"])
    with tempfile.TemporaryDirectory() as directory, switch.open("rb") as file:
        flag = mmap.mmap(file.fileno(), 1, prot=mmap.PROT_READ)
        task.context = TaskContext(job["name"], Path(directory), job["device"])
        task.create(**job["args"])
        task.init()
        task.start()
        print(_READY, end="", flush=True)
        while flag[0] != _OVER:
            if flag[0] == _RUNNING:
                task.run_next_step()
            else:
                settle()
                time.sleep(0.001)
        settle()


if __name__ == "__main__":
    drive(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))

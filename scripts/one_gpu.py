"""p ranks of a training as p processes on one GPU, for the benchmarks.

NCCL refuses that, so the pipeline's transfers go through the host over gloo (the patch ``host_p2p``).
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@contextmanager
def training(stages: int, sharing: str, arguments: list[str], log: Path) -> Iterator[Iterator[str]]:
    """A training; yields the lines that its last rank prints, among which are Megatron's own on each iteration.

    Args:
        sharing: ``mps``, inside of ``mps()``, for 100/``stages`` percent of the multiprocessors each; ``timeslice``.
        arguments: of pretrain_gpt.py.
        log: for the last rank's output; the others' goes beside it.

    Raises:
        RuntimeError: a rank failed; the message has the end of its output.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(stages), "LOCAL_RANK": "0"}
    shared |= {"LOCAL_WORLD_SIZE": str(stages), "PIPEFILL_HOST_P2P": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    if sharing == "mps":
        shared["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(100 // stages)
    ranks: list[subprocess.Popen[str]] = []
    with ExitStack() as stack:
        stack.callback(end, ranks)
        for rank in range(stages):
            where: Any = subprocess.PIPE
            if rank < stages - 1:
                where = stack.enter_context(log.with_suffix(f".rank{rank}.log").open("w"))
            command = [sys.executable, "-u", "pretrain_gpt.py", *arguments]
            environment = os.environ | shared | {"RANK": str(rank)}
            ranks.append(
                subprocess.Popen(command, cwd=ROOT, env=environment, stdout=where, stderr=subprocess.STDOUT, text=True)
            )
        seen: list[str] = []
        assert ranks[-1].stdout is not None
        yield _kept(ranks[-1].stdout, seen)
        seen += ranks[-1].stdout
        log.write_text("".join(seen), encoding="utf-8")
        codes = [process.wait() for process in ranks]
        if any(codes):
            raise RuntimeError(f"the ranks of the training ended with {codes}:\n{''.join(seen)[-3000:]}")


def _kept(lines: Iterable[str], seen: list[str]) -> Iterator[str]:
    for line in lines:
        seen.append(line)
        yield line


def end(processes: list[subprocess.Popen[str]]) -> None:
    """End what still runs: politely, since a client of MPS should end by itself, and after half a minute at once."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def mps() -> Iterator[None]:
    """An MPS daemon of our own, for this process's children."""
    with tempfile.TemporaryDirectory(prefix="mps") as pipe:  # a short path: there are sockets in it
        ours = {"CUDA_MPS_PIPE_DIRECTORY": pipe, "CUDA_MPS_LOG_DIRECTORY": pipe}
        os.environ.update(ours)
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
        try:
            yield
        finally:
            subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, check=False, timeout=60)
            for name in ours:
                del os.environ[name]

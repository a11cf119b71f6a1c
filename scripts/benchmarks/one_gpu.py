"""Trainings on one device, for the benchmarks: one real stage beside ghosts, or p ranks as p processes.

Several ranks on one GPU send their transfers through the host over gloo (the patch ``host_p2p``): NCCL takes them from
2.30 on only.  What one stage computes is then another one's bubble, so nothing but a limit of each rank's share of the
GPU, which MPS has, makes bubbles in which it is idle.
"""

from __future__ import annotations

import math
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = [sys.executable, "-u", "pretrain_gpt.py"]
# Compiling Megatron's few small functions takes longer than they do in a short training, and a C++ compiler.
_COMMON = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
_QUIT_S = 60.0  # time that the MPS daemon has to end
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@contextmanager
def free_port() -> Iterator[int]:
    """Reserve a port of this machine for rank 0: in the meantime, the kernel assigns it to no other process."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # rank 0, which listens there, does the same
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@contextmanager
def training(
    stages: int,
    sharing: str,
    arguments: list[str],
    log: Path,
    limit_s: float | None = None,
    enough: Callable[[str], bool] | None = None,
) -> Iterator[Iterator[str]]:
    """A training of p real ranks on one GPU, or on a CPU's cores; yields the lines that its last rank prints.

    Args:
        sharing: ``mps``, inside of ``mps``, for 100/``stages`` percent of the multiprocessors each; ``timeslice``.
        arguments: of pretrain_gpt.py.
        log: for the last rank's output; the others' goes beside it.
        limit_s: how long it may take; None for ever.
        enough: asked at every line: the training is to end, well and after the same iteration on all ranks.

    Raises:
        RuntimeError: a rank failed, or it took too long; the message has the end of its output.
    """
    shared = {"WORLD_SIZE": str(stages), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(stages), "PIPEFILL_HOST_P2P": "1"}
    shared["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")  # the host's name may lead nowhere
    if sharing == "mps":
        shared["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(100 // stages)
    ranks = [shared | {"RANK": str(rank)} for rank in range(stages)]
    if os.environ.get("PIPEFILL_CPU_BACKEND") == "1":  # a core each: on one, no stage would leave anything idle
        ranks = [own | {"LOCAL_RANK": own["RANK"]} for own in ranks]
    arguments = [*arguments, "--distributed-backend", "gloo", *(["--exit-signal-handler"] if enough else [])]
    with free_port() as port:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        with _processes([meeting | own for own in ranks], arguments, log, limit_s, enough) as lines:
            yield lines


@contextmanager
def on_gpus(
    stages: int, arguments: list[str], log: Path, limit_s: float | None, enough: Callable[[str], bool]
) -> Iterator[Iterator[str]]:
    """A training of p real ranks, each on a GPU of its own, over NCCL; yields the lines that its last rank prints.

    Args:
        arguments, log, limit_s, enough: as ``training`` has them.

    Raises:
        RuntimeError: a rank failed, or it took too long; the message has the end of its output.
    """
    shared = {"WORLD_SIZE": str(stages), "LOCAL_WORLD_SIZE": str(stages)}
    with free_port() as port:
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(stages)]
        with _processes(ranks, [*arguments, "--exit-signal-handler"], log, limit_s, enough) as lines:
            yield lines


@contextmanager
def beside_ghosts(
    ghosts: list[str],
    arguments: list[str],
    log: Path,
    limit_s: float | None = None,
    environment: dict[str, str] | None = None,
) -> Iterator[Iterator[str]]:
    """A training of one real stage beside ghosts; yields the lines that it prints.

    Args:
        ghosts: options of ``pipefill_patches.ghosts``.
        arguments: flags of pretrain_gpt.py.
        log: for its output.
        limit_s: how long it may take; None for ever.
        environment: variables besides those of this process.

    Raises:
        RuntimeError: it failed, or it took too long; the message has the end of its output.
    """
    program = [*SCRIPT[:-1], "-m", "pipefill_patches.ghosts", *ghosts, SCRIPT[-1]]
    with _processes([environment or {}], arguments, log, limit_s, program=program) as lines:
        yield lines


@contextmanager
def _processes(
    own: Sequence[dict[str, str]],
    arguments: list[str],
    log: Path,
    limit_s: float | None,
    enough: Callable[[str], bool] | None = None,
    program: Sequence[str] | None = None,
) -> Iterator[Iterator[str]]:
    """Processes with environments of their own; yields what the last one prints."""
    inherited = {name: value for name, value in os.environ.items() if name not in _LAUNCHER}
    ranks: list[subprocess.Popen[str]] = []
    logs = [log.with_suffix(f".rank{rank}.log") for rank in range(len(own) - 1)] + [log]
    with ExitStack() as stack:
        stack.callback(end, ranks)
        for rank, environment in enumerate(own):
            where: Any = subprocess.PIPE if logs[rank] is log else stack.enter_context(logs[rank].open("w"))
            ranks.append(
                subprocess.Popen(
                    [*(program or SCRIPT), *arguments],
                    cwd=ROOT,
                    env=inherited | _COMMON | environment,
                    stdout=where,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        watch = _Watch(ranks, limit_s)
        watch.start()
        seen: list[str] = []
        assert ranks[-1].stdout is not None
        lines = _kept(ranks[-1].stdout, seen)
        if enough is not None:
            lines = _ended(lines, enough, ranks)
        yield lines
        deque(lines, maxlen=0)  # what its user has not read
        log.write_text("".join(seen), encoding="utf-8")
        watch.join()
        if watch.late:
            raise RuntimeError(f"the training was ended after {limit_s:.0f} s, which it had; {', '.join(watch.late)}")
        if watch.failed is not None:
            said = logs[watch.failed].read_text(encoding="utf-8", errors="replace")[-3000:]
            code = ranks[watch.failed].returncode
            raise RuntimeError(f"rank {watch.failed} of the training ended with exit code {code}:\n{said}")


class _Watch(threading.Thread):
    """Ends all ranks when one of them has failed, which the others would wait for, or when they are late.

    Attributes:
        late: where each rank was that still ran when they were late; empty if they were not.
        failed: the first that failed; None if none has.
    """

    def __init__(self, ranks: Sequence[subprocess.Popen[str]], limit_s: float | None) -> None:
        super().__init__(name="ranks", daemon=True)
        self.late: list[str] = []
        self.failed: int | None = None
        self._ranks = ranks
        self._end_s = math.inf if limit_s is None else time.monotonic() + limit_s

    def run(self) -> None:
        running = {os.pidfd_open(process.pid): rank for rank, process in enumerate(self._ranks)}
        while running:
            left_s = None if self._end_s == math.inf else max(0.0, self._end_s - time.monotonic())
            ready = select.select([*running], [], [], left_s)[0]
            if not ready:
                self.late = [f"rank {rank} {_whereabouts(self._ranks[rank].pid)}" for rank in running.values()]
            for ended in ready:
                os.close(ended)
                rank = running.pop(ended)
                if self._ranks[rank].wait() and self.failed is None:
                    self.failed = rank
            if self.late or self.failed is not None:
                end(self._ranks)
                break
        for descriptor in running:
            os.close(descriptor)


def _whereabouts(pid: int) -> str:
    """Return a process's state, as ``ps`` has it, and the kernel function in which its main thread waits."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return f"was in state {state}, in {Path(f'/proc/{pid}/wchan').read_text()}"
    except OSError:
        return "had just ended"


def _ended(
    lines: Iterable[str], enough: Callable[[str], bool], ranks: Sequence[subprocess.Popen[str]]
) -> Iterator[str]:
    asked = False
    for line in lines:
        if not asked and enough(line):
            asked = True
            for process in ranks:
                process.terminate()
        yield line


def _kept(lines: Iterable[str], seen: list[str]) -> Iterator[str]:
    for line in lines:
        seen.append(line)
        yield line


def end(processes: Sequence[subprocess.Popen[str]]) -> None:
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
def mps(logs: Path) -> Iterator[None]:
    """An MPS daemon of our own, for this process's children.  No figure is lost to an error of its end.

    Args:
        logs: folder for the daemon's logs.
    """
    logs.mkdir(parents=True, exist_ok=True)
    # A short path: there are sockets in it, which the server may still remove while the folder is removed.
    with tempfile.TemporaryDirectory(prefix="mps", ignore_cleanup_errors=True) as pipe:
        ours = {"CUDA_MPS_PIPE_DIRECTORY": pipe, "CUDA_MPS_LOG_DIRECTORY": str(logs)}
        os.environ.update(ours)
        try:
            subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
            try:
                yield
            finally:
                _quit_mps()
        finally:
            for name in ours:
                os.environ.pop(name, None)


def _quit_mps() -> None:
    try:
        subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, check=False, timeout=_QUIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"the MPS daemon did not end: {error}", file=sys.stderr, flush=True)

"""From a worker's first process, which its agent started, to the job in its cage."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import NoReturn

from megatron.fill.errors import SandboxError
from megatron.fill.linux import host
from megatron.fill.sandbox.jail import Jail
from megatron.fill.sandbox.powers import limit_resources, tasks_of
from megatron.fill.worker.spec import WorkerSpec

_MOST_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Confined:
    """What a worker's first process tells its agent.

    Attributes:
        init: the first process of the job's own process namespace.
        pid: the job's process, and its process group.
        lacking: what keeps the job in everywhere, but not here.
        error: why there is no job; empty if there is.
    """

    init: int = 0
    pid: int = 0
    lacking: tuple[str, ...] = ()
    error: str = ""

    def send(self, channel: socket.socket) -> None:
        channel.send(json.dumps(asdict(self)).encode()[:_MOST_BYTES])

    @classmethod
    def receive(cls, channel: socket.socket) -> Confined | None:
        """What came; None if the other side has ended without a word."""
        data = channel.recv(_MOST_BYTES)
        return cls(**json.loads(data)) if data else None


def jail(spec: WorkerSpec, channel: socket.socket, body: Callable[[], None]) -> Jail:
    """Put ``body`` into the spec's cage, where it waits until the agent says so.

    Args:
        channel: to the agent; closed when this returns.

    Raises:
        SystemExit: it cannot be kept in as it should be, which the agent was told; or the agent has gone, or does not
            want it any more.
    """
    limits, user = spec.limits, spec.cage.user if spec.cage.user is not None else os.getuid()
    # The kernel counts all tasks of the user, those of other jobs too, and they may become more; the watch over this
    # worker's own tasks is the exact limit, this one only keeps it from being outrun.
    tasks = tasks_of(user) + 2 * limits.processes

    def prepare() -> None:
        channel.close()
        host.yield_to_main_job(spec.cpus)
        limit_resources(limits.memory_bytes if spec.device == "cpu" else None, tasks, limits.files)

    def run() -> None:
        os.chdir(spec.directory)
        body()

    try:
        held = Jail(spec.cage, prepare, run)
    except SandboxError as error:
        Confined(error=str(error)).send(channel)
        sys.exit(1)
    Confined(held.init, held.pid, tuple(held.lacking)).send(channel)
    wanted = channel.recv(1)
    channel.close()
    if not wanted:
        held.kill()
        sys.exit(1)
    held.let_go()
    return held


def apply_environment(job: Mapping[str, str]) -> None:
    """Let the job's own variables count, inside its cage.

    What the interpreter and the dynamic loader read when a program starts counts for what the job starts; Python's path
    counts for the job itself too.
    """
    os.environ.update(job)
    sys.path.extend(folder for folder in job.get("PYTHONPATH", "").split(os.pathsep) if folder)


def end_as(code: int) -> NoReturn:
    """End this process as the job has ended."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    os._exit(max(code, 0))

"""The start of a job in its sandbox, from a worker's first process, which the agent started."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from typing import NoReturn

from megatron.fill.errors import SandboxError
from megatron.fill.linux import host
from megatron.fill.sandbox.powers import limit_resources, tasks_of
from megatron.fill.sandbox.process import SandboxedProcess
from megatron.fill.worker.spec import SandboxReport, WorkerSpec


def start_sandboxed(spec: WorkerSpec, channel: socket.socket, body: Callable[[], None]) -> SandboxedProcess:
    """Start ``body`` in the spec's sandbox, report that, and let it run once the agent agrees.

    Args:
        channel: socket to the agent; closed when this returns.

    Raises:
        SystemExit: the sandbox cannot be set up, which is reported; or the agent has ended or gives the job up.
    """
    limits, user = spec.limits, spec.sandbox.user if spec.sandbox.user is not None else os.getuid()
    # The kernel counts all tasks of the user, including those of other jobs, and those may become more.  The exact
    # limit is the watch over this worker's own tasks; this one stops a job that creates them faster than that.
    tasks = tasks_of(user) + 2 * limits.processes

    def prepare() -> None:
        channel.close()
        host.yield_to_main_job(spec.cpus)
        limit_resources(limits.memory_bytes if spec.device == "cpu" else None, tasks, limits.files)

    def run() -> None:
        os.chdir(spec.directory)
        body()

    try:
        held = SandboxedProcess(spec.sandbox, prepare, run)
    except SandboxError as error:
        SandboxReport(error=str(error)).send(channel)
        sys.exit(1)
    SandboxReport(held.init, held.pid, tuple(held.lacking)).send(channel)
    wanted = channel.recv(1)
    channel.close()
    if not wanted:
        held.kill()
        sys.exit(1)
    held.let_go()
    return held


def apply_environment(job: Mapping[str, str]) -> None:
    """Set the job's own variables, inside its sandbox.

    Variables that the interpreter and the dynamic loader read at the start of a program take effect in programs that
    the job starts; PYTHONPATH takes effect in the job itself, too.
    """
    os.environ.update(job)
    sys.path.extend(folder for folder in job.get("PYTHONPATH", "").split(os.pathsep) if folder)


def end_as(code: int) -> NoReturn:
    """End this process with the job's exit status, or by the same signal if ``code`` is negative."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    os._exit(max(code, 0))

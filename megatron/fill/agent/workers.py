"""Worker processes of an agent: those that have a job, and a spare one for the next job."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from megatron.fill.agent.admission import environment, job_sandbox, job_variables
from megatron.fill.agent.context import AgentContext
from megatron.fill.agent.ranking import Resident
from megatron.fill.device.port import Limits, Sharing
from megatron.fill.folders import run_of
from megatron.fill.linux import reap, safefile
from megatron.fill.linux.isolated import program
from megatron.fill.linux.tree import MARK, OWN
from megatron.fill.pages.control import RunState
from megatron.fill.sandbox.config import Bind, Sandbox
from megatron.fill.store.location import database_files, password_files
from megatron.fill.store.values import Job
from megatron.fill.worker.spec import SandboxReport, WorkerSpec

logger = logging.getLogger("pipefill.agent")

PROGRAM = "PIPEFILL_WORKER_PROGRAM"  # variable with another module for the process, and arguments before those here
AHEAD = ("numpy",)  # imported by most tasks, and costs little memory
# A worker's start-up must not compete with the training either.
_AT_IDLE_PRIORITY = [chrt, "--idle", "0"] if (chrt := shutil.which("chrt")) else []
_MEMORY_FILES_BYTES = 1 << 30  # limit for a job without a memory cap
_NUMBERS = itertools.count()  # of this process's workers: two pools must not give two workers the same name


class WorkerPool:
    """Starts workers' first processes, and forgets them when they have ended; for any thread."""

    def __init__(self, context: AgentContext) -> None:
        self._context = context
        self._working: set[int] = set()  # pids of those that have a job
        self._standby: WorkerProcess | None = None
        # Held while a process is started and while orphans are ended, so that a new process is not ended as an orphan.
        self._lock = threading.RLock()

    @property
    def working(self) -> list[int]:
        """The pids of the processes that have a job."""
        return sorted(self._working.copy())

    @contextmanager
    def worker(self, job: Job) -> Iterator[WorkerProcess]:
        """Provide a worker's first process, and leave none of the worker at the end; OSError if it cannot start."""
        worker = self._start(job)
        try:
            yield worker
        finally:
            try:
                worker.end()
            finally:
                with self._lock:
                    self._working.discard(worker.pid)
                    reap.end_descendants()  # those that left its process group are children of this process now

    def stand_by(self) -> None:
        """Start a spare process for the next job, if there is none."""
        context = self._context
        with self._lock:
            if self._standby is None and not context.over and context.control.state is not RunState.KILLED:
                try:
                    self._standby = WorkerProcess(context, idle=True, ahead=AHEAD)
                except OSError as error:  # this may succeed for the next job
                    logger.warning("no worker stands by: %s", error)

    def stand_down(self) -> None:
        """End the spare process."""
        with self._lock:
            if self._standby is not None:
                self._standby.end()
                self._standby = None

    def _start(self, job: Job) -> WorkerProcess:
        """Return the spare process if it suits the job, otherwise a new one."""
        task, plain = job.work.command is None, not job.work.env
        with self._lock:
            # The spare process has imported libraries, which may have read variables; and it runs at idle priority,
            # which is too low for watching a command.
            worker = None
            if task and plain and self._standby is not None:
                if self._standby.alive:
                    worker, self._standby = self._standby, None
                else:
                    self.stand_down()
            worker = worker or WorkerProcess(self._context, idle=task)
            self._working.add(worker.pid)
            return worker


class WorkerProcess:
    """Starts the process, which then waits for its job, on which the start does not depend, and ends with this process.

    Args:
        idle: start at idle priority; watching a command needs a higher one.
        ahead: modules to import while it waits for a job.

    Raises:
        OSError: it cannot be started; in ``give`` and ``begin``, it has ended.
    """

    def __init__(self, context: AgentContext, *, idle: bool, ahead: Sequence[str] = ()) -> None:
        # Unique on this machine: by this name the limiter finds processes that the worker started.
        self.name = f"{os.getpid()}-{next(_NUMBERS)}"
        spec = context.spec
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The run folder is for people who look at the process's command line.
        arguments = (str(os.getpid()), str(theirs.fileno()), ",".join(ahead), spec.run_dir)
        command = program(*os.environ.get(PROGRAM, "megatron.fill.worker.worker").split(), *arguments)
        try:
            with theirs:
                self.process = subprocess.Popen(
                    [*_AT_IDLE_PRIORITY, *command] if idle else command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    cwd="/",
                    pass_fds=(*context.worker_fds, theirs.fileno()),
                    process_group=0,  # not a new session: that would be a new autogroup
                    # /proc/PID/environ shows the mark, whatever is changed later.
                    env={**environment(os.environ, {}, spec.user, Path("/")), MARK: self.name},
                )
        except BaseException:
            self._channel.close()
            raise
        self.pid = self.process.pid
        OWN.add(self.pid)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def give(self, spec_path: Path, log_fd: int) -> None:
        """Send the job to the process, which then builds the sandbox and reports it."""
        socket.send_fds(self._channel, [os.fsencode(spec_path)], [log_fd])

    def sandbox_report(self, within_s: float) -> SandboxReport | None:
        """Return the sandbox that the worker reports; None if it ended before, TimeoutError if it is late."""
        self._channel.settimeout(within_s)
        return SandboxReport.receive(self._channel)

    def begin(self) -> None:
        self._channel.send(b"x")
        self._channel.close()

    def end(self) -> str:
        """Kill the process if it has not ended, and return its output that has not been read."""
        self._channel.close()
        self.process.kill()
        assert self.process.stdout is not None
        said = b"" if self.process.stdout.closed else self.process.stdout.read()
        self.process.wait()
        OWN.discard(self.pid)
        return said.decode(errors="replace").strip()


def write_spec(
    context: AgentContext, job: Job, limits: Limits, directory: Path, fixed: Mapping[str, str], beside: Resident | None
) -> Path:
    """Write the spec into the job's folder, and return its path.

    Args:
        fixed: variables that the device needs, which the job must not change.
        beside: the resident job if this one is a tail job.

    Raises:
        OSError: it cannot be written.
    """
    agent = context.spec
    spec = WorkerSpec(
        name=job.name,
        directory=str(directory),
        gate_fd=agent.gate_fd,
        board_fd=agent.board_fd,
        control_fd=context.control_fd,
        baton_fd=context.baton.fd,
        environment=environment(os.environ, fixed, agent.user, directory),
        sandbox=_sandbox(context, job, limits, directory),
        tail=beside is not None,
        cycle=None if beside is None else context.ranking.leftover(beside),
        profiles=context.ranking.profiles_of(job),
        checkpoint_s=agent.checkpoint_s,
        margin_bytes=context.memory.kept_bytes,
        device=context.device.worker_name,
        cpus=agent.cpus,
        # A job could bring its own module with an allowed name, so an allowed module must be installed.
        work=replace(job.work, search=()) if agent.allow else job.work,
        limits=limits,
        sharing=Sharing.TIMESLICE if agent.mps_pipe is None else Sharing.MPS,
        env={name: value for name, value in job.work.env.items() if name not in fixed}
        | job_variables(job, agent.run_dir, directory),
    )
    path = directory / "spec.json"
    safefile.write_text(path, spec.to_json(), mode=0o600)
    return path


def _sandbox(context: AgentContext, job: Job, limits: Limits, directory: Path) -> Sandbox:
    agent = context.spec
    binds = (*map(Bind, job.work.search), *agent.binds)
    return replace(
        job_sandbox(agent.user, agent.namespaces, directory, agent.network, binds, agent.mps_pipe),
        runs=tuple({agent.run_dir, str(run_of(directory))}),
        masked=(*database_files(agent.store), *password_files(agent.store)),
        memory_files_bytes=limits.memory_bytes or _MEMORY_FILES_BYTES,
        devices=context.device.nodes,
    )

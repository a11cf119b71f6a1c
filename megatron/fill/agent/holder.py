"""The agent's handle of a worker's first process.

On cores that the training keeps busy, starting the interpreter and importing take longer than a short job, and the
bubbles of that time are lost.  The agent therefore starts the next worker's first process before there is a job.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron.fill.linux.isolated import program
from megatron.fill.linux.tree import MARK
from megatron.fill.worker.confined import Confined

# A worker's start-up must not compete with the training either.
_AT_IDLE_PRIORITY = [chrt, "--idle", "0"] if (chrt := shutil.which("chrt")) else []


class Holder:
    """Starts the process, which then waits for its job and ends when this process does.

    The start does not depend on the job: neither on its variables nor on a folder that it can write to.

    Args:
        name: the worker's name, by which its limiter finds processes that it started; unique on this machine.
        fds: descriptors that every worker of this agent maps.
        environment: environment of the process and its libraries.
        run_dir: the run folder, shown in the process's command line for people who look at it.
        idle: start at idle priority; watching a command needs a higher one.
        ahead: modules to import while it waits for a job.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self,
        name: str,
        fds: Sequence[int],
        environment: Mapping[str, str],
        run_dir: str,
        *,
        idle: bool,
        ahead: Sequence[str] = (),
    ) -> None:
        self.name = name
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        told = (str(os.getpid()), str(theirs.fileno()), ",".join(ahead), run_dir)
        command = program("megatron.fill.worker.worker", *told)
        try:
            with theirs:
                self.process = subprocess.Popen(
                    [*_AT_IDLE_PRIORITY, *command] if idle else command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    cwd="/",
                    pass_fds=(*fds, theirs.fileno()),
                    process_group=0,  # not a new session: that would be a new autogroup
                    env={**environment, MARK: name},  # /proc/PID/environ shows this, whatever is changed later
                )
        except BaseException:
            self._channel.close()
            raise
        self.pid = self.process.pid

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        return self.process.poll() is None

    def give(self, spec_path: Path, log_fd: int) -> None:
        """Send the job to the process, which then builds the sandbox and reports it (``confined``).

        Raises:
            OSError: the process has ended.
        """
        socket.send_fds(self._channel, [os.fsencode(spec_path)], [log_fd])

    def confined(self, within_s: float) -> Confined | None:
        """Return the sandbox that the worker reports, or None if it ended before reporting.

        Raises:
            TimeoutError: it has not reported within ``within_s`` seconds.
        """
        self._channel.settimeout(within_s)
        return Confined.receive(self._channel)

    def let_go(self) -> None:
        """Let the job begin.

        Raises:
            OSError: the process has ended.
        """
        self._channel.send(b"x")
        self._channel.close()

    def end(self) -> str:
        """Kill the process if it has not ended, and return its output that has not been read."""
        self._channel.close()
        self.process.kill()
        assert self.process.stdout is not None
        if self.process.stdout.closed:
            self.process.wait()
            return ""
        return self.process.communicate()[0].decode(errors="replace").strip()

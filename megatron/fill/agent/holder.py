"""A worker's first process, as its agent holds it.

On cores that the training keeps busy, the interpreter and its imports take longer than a short job does, and the
bubbles of that time are lost.  An agent therefore has the next worker's first process ready before its job is there.
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

# Even a worker's start-up is not to compete with the main job.
_AT_IDLE_PRIORITY = [chrt, "--idle", "0"] if (chrt := shutil.which("chrt")) else []


class Holder:
    """Waits for its job from the start on, and ends when we do.

    Nothing of a job has a say in how it is started: neither its variables nor a folder that it may write to.

    Args:
        name: the worker's, by which its limiter knows what it started: unique among those of this machine.
        fds: what every worker of this agent maps.
        environment: what it and its libraries are started with.
        run_dir: whose it is, for people who look at the machine's processes.
        idle: at idle priority from its first instruction on; what watches a command needs more than that.
        ahead: modules that its job may use, imported while it waits.

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
                    env={**environment, MARK: name},  # as the kernel shows it, which later changes are not
                )
        except BaseException:
            self._channel.close()
            raise
        self.pid = self.process.pid

    @property
    def alive(self) -> bool:
        """Whether it still waits for its job."""
        return self.process.poll() is None

    def give(self, spec_path: Path, log_fd: int) -> None:
        """Hand it its job: it builds the walls, and says what they are (``confined``).

        Raises:
            OSError: it has ended.
        """
        socket.send_fds(self._channel, [os.fsencode(spec_path)], [log_fd])

    def confined(self, within_s: float) -> Confined | None:
        """What it says of the job's walls; None if it has ended without a word.

        Raises:
            TimeoutError: it has not said anything yet.
        """
        self._channel.settimeout(within_s)
        return Confined.receive(self._channel)

    def let_go(self) -> None:
        """Let the job begin.

        Raises:
            OSError: it has ended.
        """
        self._channel.send(b"x")
        self._channel.close()

    def end(self) -> str:
        """End it, if it has not ended; what it said that nobody has read."""
        self._channel.close()
        self.process.kill()
        assert self.process.stdout is not None
        if self.process.stdout.closed:
            self.process.wait()
            return ""
        return self.process.communicate()[0].decode(errors="replace").strip()

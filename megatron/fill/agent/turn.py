"""The turn on a device: two locks by which a rank that starts sends the keeper of an earlier one away.

A rank locks its byte of ``RUN/agents/turn-NODE-0.lock`` when it starts, and then looks whether a keeper holds the
other.  A keeper locks its own first, and then looks for a rank.  So one of them sees the other, in whatever order they
come.  The locks end with their processes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from pathlib import Path

from megatron.fill.folders import AGENTS
from megatron.fill.linux import recordlock
from megatron.fill.linux.tree import descendants, read_process

logger = logging.getLogger("pipefill")

LEAVE_S = 5.0  # time that a keeper has to end its jobs in order
_DYING_S = 5.0  # time to wait for killed processes, which release their device memory first
_RANK, _KEEPER = 0, 1  # bytes of the file
_LOOK_S = 0.02


class Turn:
    """The locks of one device of a run on this node.

    The process must keep this object until its end, and make no other of the same file: both would release its lock.

    Args:
        place: number of the device's rank on this node.

    Raises:
        FileNotFoundError: the run folder is new.
        OSError: the file cannot be opened.
    """

    def __init__(self, run_dir: Path, place: int) -> None:
        self.path = run_dir / AGENTS / f"turn-{os.uname().nodename}-{place}.lock"
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def take(self, leave_s: float = LEAVE_S) -> bool:
        """Take the device as a rank: a keeper ends its jobs meanwhile, and is killed with them if that takes too long.

        Returns:
            True if there was a keeper.

        Raises:
            OSError: the file cannot be locked.
        """
        recordlock.lock(self._fd, _RANK, 1, shared=True)  # shared: a second training is refused by the run's lock
        end_s, found = time.monotonic() + leave_s, False
        while held := recordlock.holder(self._fd, _KEEPER, 1):
            found = True
            if time.monotonic() > end_s:
                logger.warning("the jobs between two trainings did not end within %g s; they are killed", leave_s)
                _kill(held[1])
                break
            time.sleep(_LOOK_S)
        return found

    def keep(self) -> bool:
        """Take the device as a keeper; False if a rank or another keeper has it.

        Raises:
            OSError: the file cannot be locked.
        """
        return recordlock.lock(self._fd, _KEEPER, 1) and not self.wanted

    @property
    def wanted(self) -> bool:
        """True if a rank is there."""
        return recordlock.holder(self._fd, _RANK, 1) is not None


def _kill(pid: int) -> None:
    """Kill a keeper and all processes below it, and wait until they have released what they hold."""
    if pid <= 1:  # of another namespace of processes
        return
    doomed = [process for one in (pid, *descendants(pid)) if (process := read_process(one)) is not None]
    for process in doomed:
        with contextlib.suppress(OSError):
            os.kill(process.pid, signal.SIGKILL)
    end_s = time.monotonic() + _DYING_S
    for process in doomed:
        while _lives(process.pid, process.started) and time.monotonic() < end_s:
            time.sleep(_LOOK_S)


def _lives(pid: int, started: int) -> bool:
    process = read_process(pid)
    return process is not None and process.started == started and process.alive

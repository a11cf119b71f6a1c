"""The turn on a device: locks by which a rank that starts sends away who serves the jobs of an earlier start.

They are bytes of ``RUN/agents/turn-NODE-0.lock``, a file for each rank's place on its node, which its warden creates
with ``--fill-between``.  A rank that starts locks its byte, and then looks whether a keeper holds another.  A keeper
locks its own first, and then looks for a rank: so one of them sees the other.  A warden holds a third while it ends the
jobs of a rank that is dead, until the keeper that follows has its own.  The locks end with their processes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from megatron.fill.folders import AGENTS
from megatron.fill.linux import recordlock
from megatron.fill.linux.reap import end_below
from megatron.fill.linux.wakeup import readable

logger = logging.getLogger("pipefill")

LEAVE_S = 5.0  # time that all keepers together have to end their jobs in order
_DYING_S = 5.0  # time to wait for killed processes, which release their device memory first
_RANK, _WARDEN, _KEEPER = 0, 1, 2  # bytes of the file
_LOOK_S = 0.02


def turn_file(run_dir: Path, place: int) -> Path:
    """Return the path of the locks for the device of a place, the number of its rank on this node."""
    return run_dir / AGENTS / f"turn-{os.uname().nodename}-{place}.lock"


class DeviceTurn:
    """The locks of one device of a run on this node.

    The process must keep this object until its end, and make no other of the same file: both would release its locks.

    Args:
        create: make the file if there is none.

    Raises:
        OSError: the file cannot be opened, or there is none; in each method, it cannot be locked.
    """

    def __init__(self, path: Path, create: bool = False) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
        self._fd = os.open(path, flags, 0o600)

    def ask(self) -> None:
        """Take the device as a rank, and so ask whoever serves jobs on it to leave."""
        recordlock.lock(self._fd, _RANK, 1, shared=True)  # a second training is refused by the run's lock

    def keep(self) -> bool:
        """Take the device as a keeper; False if a rank or another keeper has it."""
        return recordlock.lock(self._fd, _KEEPER, 1) and not self.wanted

    def end_jobs(self) -> None:
        """Have ranks that start wait for this process, a warden that ends the jobs of a dead rank."""
        recordlock.lock(self._fd, _WARDEN, 1)

    @property
    def wanted(self) -> bool:
        """True if a rank has its lock."""
        return recordlock.holder(self._fd, _RANK, 1) is not None

    @property
    def kept(self) -> bool:
        """True if a keeper has its lock."""
        return recordlock.holder(self._fd, _KEEPER, 1) is not None

    @property
    def server(self) -> int | None:
        """The pid of a keeper or warden that has the device, as far as this process sees it; None if there is none."""
        held = recordlock.holder(self._fd, _WARDEN, 2)
        return None if held is None else held[1]

    def close(self) -> None:
        os.close(self._fd)


def take(run_dir: Path, place: int, leave_s: float = LEAVE_S) -> tuple[DeviceTurn | None, bool]:
    """Take the device of a place as a rank, once nobody on this node serves jobs of an earlier start.

    All places are asked, since nobody knows which devices they had.  They end their jobs at the same time, and are
    killed with them if that takes longer than ``leave_s``.

    Returns:
        The place's turn, None if nobody has ever served jobs there between two trainings; and True if anybody did now.
    """
    own = turn_file(run_dir, place)
    turns: list[DeviceTurn] = []
    with _logged(own.parent):
        for path in _files(own):
            with _logged(path):
                turn = DeviceTurn(path)
                turn.ask()
                turns.append(turn)
    found = _await_leave(turns, leave_s)
    mine = None
    for turn in turns:
        if turn.path == own:
            mine = turn
        else:
            turn.close()  # keepers of this start may have it
    return mine, found


def _files(own: Path) -> list[Path]:
    """The locks of all places on this node, this one's first."""
    prefix = own.stem[: own.stem.rindex("-") + 1]  # another node's name may begin with that of this one
    paths = [path for path in own.parent.glob("turn-*.lock") if path.stem.removeprefix(prefix).isdigit()]
    return sorted(paths, key=lambda path: (path != own, path))


def _await_leave(turns: list[DeviceTurn], leave_s: float) -> bool:
    """Wait until nobody serves jobs on these devices, and kill who stays; True if there was anybody."""
    end_s, there = time.monotonic() + leave_s, [turn for turn in turns if _served(turn)]
    found = bool(there)
    while there and time.monotonic() <= end_s:
        time.sleep(_LOOK_S)
        there = [turn for turn in there if _served(turn)]
    end_s = time.monotonic() + _DYING_S
    for turn in there:
        with _logged(turn.path):
            how = "were killed" if _end(turn, end_s) else "cannot be killed: they may go on beside the training"
            logger.warning("jobs between two trainings did not end within %g s, and %s (%s)", leave_s, how, turn.path)
    return found


def _served(turn: DeviceTurn) -> bool:
    with _logged(turn.path):
        return turn.server is not None
    return False


@contextlib.contextmanager
def _logged(path: Path) -> Iterator[None]:
    """Log an OSError of this block: the training starts anyway."""
    try:
        yield
    except OSError as error:
        logger.warning("it is not known whether jobs of an earlier start go on: %s: %s", path, error.strerror)


def _end(turn: DeviceTurn, end_s: float) -> bool:
    """Kill who serves jobs on a device, and all processes below, until ``end_s``; True if none is left."""
    while (pid := turn.server) is not None:
        if pid <= 1:  # in another namespace of processes, or on another machine
            return False
        try:
            process = os.pidfd_open(pid)
            try:
                # If it still holds the lock, the descriptor is of this process, and not of a later one with its pid.
                if turn.server == pid and not _kill(process, pid, end_s):
                    return False
            finally:
                os.close(process)
        except ProcessLookupError:  # it has just ended
            time.sleep(_LOOK_S)
        except PermissionError:  # another user's
            return False
        if time.monotonic() > end_s:
            return turn.server is None
    return True


def _kill(process: int, pid: int, end_s: float) -> bool:
    """Kill a keeper or warden, which adopts orphans, and all processes below it; True if none is left.

    It is stopped first and killed last: until then, what it has started cannot escape to another parent.
    """
    signal.pidfd_send_signal(process, signal.SIGSTOP)
    ended = end_below(pid, end_s - time.monotonic())
    signal.pidfd_send_signal(process, signal.SIGKILL)
    gone = readable(max(_LOOK_S, end_s - time.monotonic()), process)  # then its memory is released
    return ended and bool(gone)

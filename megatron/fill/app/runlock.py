"""The lock of a run folder, which is for one training at a time: each rank locks its byte of ``RUN/run.lock``.

The locks are POSIX record locks.  The kernel releases them however a process ends, so a crash leaves no stale lock; NFS
forwards them between nodes; and a forked process (a data loader) does not keep them, as it would with ``flock``.  They
belong to the process and end when it closes any descriptor of the file, so nothing else in it may open the file.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from megatron.fill import untrusted
from megatron.fill.errors import RunTaken
from megatron.fill.folders import RUN_LOCK
from megatron.fill.linux import recordlock
from megatron.fill.store.filesystem import network_file_system
from megatron.fill.types import RankInfo

logger = logging.getLogger("pipefill")

_DYING_S = 5.0  # a killed process releases its memory first, and then its locks
# The server of a network file system keeps the locks of a lost node for the lease time: 90 s for NFS 4.
_LEASE_S = 100.0
_LOOK_S = 0.2


class RunLock:
    """This process's lock on a run folder."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def take(cls, run_dir: Path, ranks: int, most_s: float = _LEASE_S) -> RunLock:
        """Lock a run folder as rank 0 of a training, after another training's end, but at most ``most_s`` seconds from
        now.

        Raises:
            RunTaken: a rank of another training holds the folder.
            OSError: it cannot be made.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        fd = _locked(run_dir / RUN_LOCK, 0, 0, most_s)
        note = {"host": os.uname().nodename, "pid": os.getpid(), "since_s": time.time(), "ranks": ranks}
        with suppress(OSError):  # a full disk: messages elsewhere lack this, and the lock holds anyway
            os.pwrite(fd, json.dumps(note).encode().ljust(os.fstat(fd).st_size), 0)
        _unlock(fd, 1, 0)  # for the other ranks of this training
        return cls(fd)

    @classmethod
    def join(cls, run_dir: Path, rank: int) -> RunLock:
        """Lock the folder as another rank of the training whose rank 0 has locked it.

        Raises:
            RunTaken: the same rank of another training holds it; so on this node it is another folder of that name.
            OSError: it cannot be opened.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        return cls(_locked(run_dir / RUN_LOCK, rank, 1, _DYING_S))

    def release(self) -> None:
        os.close(self._fd)


def lock_run_folder(name: str, info: RankInfo, most_s: float = _LEASE_S) -> tuple[Path, RunLock | None] | None:
    """Lock the run folder on every rank (a collective), and return it with the lock; None if it cannot be used.

    Args:
        name: the run folder; rank 0's value counts.
        most_s: longest wait for another training's end, in seconds.

    Raises:
        RunTaken: another training holds the folder on some rank; raised on every rank, with the same message.
    """
    lock, refused = None, ""
    if info.rank == 0:
        name, lock, refused = _taken(name, info.world_size, most_s)
    if info.world_size > 1:
        import torch.distributed as dist

        told = [name, refused]
        dist.broadcast_object_list(told, src=0)
        name, refused = told
        if name and not refused:
            if info.rank != 0:
                lock, refused = _joined(name, info.rank)
            found = [""] * info.world_size
            dist.all_gather_object(found, refused)
            refused = next(filter(None, found), "")
    if refused:
        if lock is not None:
            lock.release()
        raise RunTaken(refused)
    return (Path(name), lock) if name else None


def exit_together(error: str) -> NoReturn:
    """End this rank with status 2, as every other rank does at the same time; rank 0 prints the error before that.

    SIGTERM is ignored, since the launcher sends it to the other ranks when the first one has ended.
    """
    import torch.distributed as dist

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.environ.get("RANK", "0") == "0":
        print(error, file=sys.stderr, flush=True)
    if dist.is_initialized():
        with suppress(RuntimeError):  # another rank has ended
            dist.barrier()
    sys.exit(2)


def _taken(name: str, ranks: int, most_s: float) -> tuple[str, RunLock | None, str]:
    """Return the folder (empty if it cannot be used), its lock, and the reason if another training holds it."""
    try:
        return name, RunLock.take(Path(name), ranks, most_s), ""
    except RunTaken as error:
        return name, None, str(error)
    except OSError as error:
        logger.warning("the run folder %s cannot be used, so nothing is filled: %s", name, error)
        return "", None, ""


def _joined(name: str, rank: int) -> tuple[RunLock | None, str]:
    """Return the lock, and the reason if another training holds it."""
    try:
        return RunLock.join(Path(name), rank), ""
    except RunTaken as error:
        return None, str(error)
    except OSError as error:
        logger.warning("rank %d cannot hold the run folder %s: %s", rank, name, error)
        return None, ""


def _locked(path: Path, start: int, length: int, most_s: float) -> int:
    """Lock ``length`` bytes of the file (0 for all), and return its descriptor.

    If another process holds them, wait in case it is ending; RunTaken if it still holds them then.
    """
    network = network_file_system(path.parent)
    began_s, said = time.monotonic(), False
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)  # no other user may lock it
        try:
            held = not recordlock.lock(fd, start, length)
        except OSError as error:
            if error.errno not in recordlock.UNSUPPORTED:
                os.close(fd)
                raise
            logger.warning("%s cannot be locked (%s): a second training would not be noticed", path, error.strerror)
            return fd
        # Not if the file was removed in the meantime, as a user does to override a lost node's lock.
        if not held and os.path.exists(path) and os.path.samestat(os.fstat(fd), os.stat(path)):
            return fd
        other = _Other(fd, start, length) if held else None
        os.close(fd)
        if other is not None:
            lost = bool(network) and other.elsewhere
            if time.monotonic() - began_s > min(most_s, _LEASE_S if lost else _DYING_S):
                raise RunTaken(_refusal(path, other))
            if lost and not said:
                said = True
                logger.warning(
                    "%s is held by another training (%s); waiting for %.0f s, in case its node is lost",
                    path,
                    other,
                    min(most_s, _LEASE_S),
                )
        time.sleep(_LOOK_S)


def _unlock(fd: int, start: int, length: int) -> None:
    with suppress(OSError):
        fcntl.lockf(fd, fcntl.LOCK_UN, length, start)


class _Other:
    """The training that has the lock, as far as the kernel and the note in the file identify it."""

    def __init__(self, fd: int, start: int, length: int) -> None:
        self.rank, pid = start, 0
        with suppress(OSError):
            self.rank, pid = recordlock.holder(fd, start, length) or (start, 0)
        try:
            note = untrusted.parse_json(os.pread(fd, 4096, 0))
            self.host, self.since_s = str(note["host"]), float(note["since_s"])
            self.pid = int(note["pid"]) if self.rank == 0 else pid
        except (OSError, ValueError, KeyError, TypeError):
            self.host, self.since_s, self.pid = "", 0.0, pid

    @property
    def elsewhere(self) -> bool:
        """True if it may be on another node."""
        return self.host != os.uname().nodename

    def __str__(self) -> str:
        at = f" on {self.host}" if self.host else ""
        process = f", process {self.pid}{at}" if self.pid > 0 and (self.rank == 0 or not self.elsewhere) else at
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since_s)) if self.since_s else ""
        return f"its rank {self.rank}{process}{f', since {moment}' if moment else ''}"


def _refusal(path: Path, other: _Other) -> str:
    lost = f"; if {other.host or 'its node'} is lost, remove {path}" if other.elsewhere else ""
    return (
        f"the run folder {path.parent} is in use by another training ({other}); "
        f"expected another --fill-report, or that that training has ended{lost}"
    )

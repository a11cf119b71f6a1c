"""The lock of a run folder, which is for one training at a time: each rank locks its byte of ``RUN/run.lock``.

The locks are POSIX record locks (``linux.recordlock``): a crash leaves no stale lock, NFS forwards them between nodes,
and a forked process (a data loader) does not keep them, as it would with ``flock``.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
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


def take(run_dir: Path, ranks: int, most_s: float = _LEASE_S) -> int:
    """Lock a run folder as rank 0 of a training, after another training's end, but at most ``most_s`` seconds from now.

    Return the descriptor that holds the lock until it is closed.  RunTaken if a rank of another training holds the
    folder; OSError if it cannot be made.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    fd = _locked(run_dir / RUN_LOCK, 0, 0, most_s)
    note = {"host": os.uname().nodename, "pid": os.getpid(), "since_s": time.time(), "ranks": ranks}
    with suppress(OSError):  # a full disk: messages elsewhere lack this, and the lock holds anyway
        os.pwrite(fd, json.dumps(note).encode().ljust(os.fstat(fd).st_size), 0)
    with suppress(OSError):
        fcntl.lockf(fd, fcntl.LOCK_UN, 0, 1)  # all but the first byte, for the other ranks of this training
    return fd


def join(run_dir: Path, rank: int) -> int:
    """Lock the folder as another rank of the training whose rank 0 has locked it; as ``take``.

    If the same rank of another training holds it, it is another folder of that name on this node.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    return _locked(run_dir / RUN_LOCK, rank, 1, _DYING_S)


def lock_run_folder(name: str, info: RankInfo, most_s: float = _LEASE_S) -> tuple[Path, int | None] | None:
    """Lock the run folder, which rank 0 names, on every rank (a collective); None if it cannot be used.

    Return it with the descriptor that holds the lock until it is closed; None if this rank cannot hold it.  RunTaken,
    on every rank with the same message, if another training holds the folder on some rank.
    """
    lock, refused = None, ""
    if info.rank == 0:
        lost = f"the run folder {name} cannot be used, so nothing is filled"
        lock, refused = _tried(lambda: take(Path(name), info.world_size, most_s), lost)
        name = name if lock is not None or refused else ""
    if info.world_size > 1:
        import torch.distributed as dist

        told = [name, refused]
        dist.broadcast_object_list(told, src=0)
        name, refused = told
        if name and not refused:
            if info.rank != 0:
                lost = f"rank {info.rank} cannot hold the run folder {name}"
                lock, refused = _tried(lambda: join(Path(name), info.rank), lost)
            found = [""] * info.world_size
            dist.all_gather_object(found, refused)
            refused = next(filter(None, found), "")
    if refused:
        if lock is not None:
            os.close(lock)
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


def _tried(lock: Callable[[], int], lost: str) -> tuple[int | None, str]:
    """Return the lock, and the reason if another training holds it; an OSError is logged after what is ``lost``."""
    try:
        return lock(), ""
    except RunTaken as error:
        return None, str(error)
    except OSError as error:
        logger.warning("%s: %s", lost, error)
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
        other, host = _other(fd, start, length) if held else ("", "")
        os.close(fd)
        if held:
            elsewhere = host != os.uname().nodename
            lost = bool(network) and elsewhere
            if time.monotonic() - began_s > min(most_s, _LEASE_S if lost else _DYING_S):
                remedy = f"; if {host or 'its node'} is lost, remove {path}" if elsewhere else ""
                raise RunTaken(
                    f"the run folder {path.parent} is in use by another training ({other}); "
                    f"expected another --fill-report, or that that training has ended{remedy}"
                )
            if lost and not said:
                said = True
                waiting = f"waiting for {min(most_s, _LEASE_S):.0f} s, in case its node is lost"
                logger.warning("%s is held by another training (%s); %s", path, other, waiting)
        time.sleep(_LOOK_S)


def _other(fd: int, start: int, length: int) -> tuple[str, str]:
    """Return a text on the training that has the lock, and its host (empty if unknown), by the kernel and its note."""
    rank, pid, host, since_s = start, 0, "", 0.0
    with suppress(OSError):
        rank, pid = recordlock.holder(fd, start, length) or (start, 0)
    with suppress(OSError, ValueError, KeyError, TypeError):
        note = untrusted.parse_json(os.pread(fd, 4096, 0))
        host, since_s, pid = str(note["host"]), float(note["since_s"]), int(note["pid"]) if rank == 0 else pid
    at = f" on {host}" if host else ""
    process = f", process {pid}{at}" if pid > 0 and (rank == 0 or host == os.uname().nodename) else at
    since = time.strftime(", since %Y-%m-%d %H:%M:%S", time.localtime(since_s)) if since_s else ""
    return f"its rank {rank}{process}{since}", host

"""POSIX record locks: locks on bytes of a file, which the kernel releases however their process ends.

They belong to the process and end when it closes any descriptor of the file, so nothing else in it may open the file.
A forked process does not have them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct

UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}  # errors of a file system without them
_FLOCK = "hhqqi"  # struct flock of a 64-bit Linux


def lock(fd: int, start: int, length: int, *, shared: bool = False) -> bool:
    """Lock ``length`` bytes of a file (0 for all from ``start`` on); False if another process holds them.

    Others may hold a ``shared`` lock too.  OSError if the file cannot be locked.
    """
    try:
        fcntl.lockf(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB, length, start)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def holder(fd: int, start: int, length: int) -> tuple[int, int] | None:
    """Return the first byte that another process holds, and its pid as far as this one sees it; None if none does."""
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
    kind, _, first, _, pid = struct.unpack_from(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, asked))
    return None if kind == fcntl.F_UNLCK else (first, pid)

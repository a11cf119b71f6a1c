"""The agent's log, which weeks of jobs must not let grow without end."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from megatron.fill.linux.files import replacing

MOST_BYTES = 8 * 2**20


def turn_over(fd: int = 2, most_bytes: int = MOST_BYTES) -> None:
    """Move the log behind a descriptor, once it is that long, into ``NAME.1``, in the place of what is there.

    Agent and warden append to the same open file, so it is emptied and not renamed; a line that comes meanwhile may be
    lost.  A terminal or a pipe is left alone.  OSError if the file cannot be copied; then it is as it was.
    """
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_size <= most_bytes or not found.st_nlink:
        return
    path = Path(os.readlink(f"/proc/self/fd/{fd}"))
    if not os.path.samestat(path.stat(), found):  # another one's by now
        return
    with replacing(path.with_name(f"{path.name}.1")) as temporary:
        shutil.copyfile(path, temporary)
    os.truncate(fd, 0)

"""Detection of network file systems, on which SQLite's usual journal (WAL) cannot be used."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import tempfile
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
_NETWORK = {
    *("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "smbfs", "glusterfs", "panfs", "afs"),
    *("orangefs", "pvfs2", "wekafs", "ocfs2", "gfs2", "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.juicefs"),
}


def network_file_system(path: str | Path) -> str:
    """The type of the network file system that ``path`` is on, such as ``nfs4``; empty if it is on another kind."""
    real, found, longest = os.path.realpath(path), "", -1
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        before, dash, after = line.partition(" - ")
        fields = before.split()
        if not dash or len(fields) < 5:
            continue
        # mountinfo escapes blanks and some other characters as three octal digits.
        place = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
        inside = place == "/" or real == place or real.startswith(place + "/")
        if inside and len(place) >= longest:  # a later mount at the same place hides the earlier one
            longest, found = len(place), after.split()[0]
    return found if found in _NETWORK else ""


def has_locks(folder: Path) -> bool:
    """True unless a file in ``folder`` cannot be locked, as on Lustre that is mounted without ``flock``."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
    return True

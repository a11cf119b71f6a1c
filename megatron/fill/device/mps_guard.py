"""Stops a run's MPS daemon when the run is over, however it ended.

No rank can: each is a client until its last moment, and a daemon waits for its clients.

    python -m megatron.fill.device.mps_guard PIPE LOG OWNER
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

from megatron.fill.device.mps import PROGRAM, MpsDaemon


def start(daemon: MpsDaemon, owner: int) -> subprocess.Popen[bytes]:
    """Watch over a daemon of ours from a process of its own, until the process ``owner`` ends."""
    return subprocess.Popen(
        [sys.executable, "-m", "megatron.fill.device.mps_guard", str(daemon.pipe), str(daemon.log), str(owner)],
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is not for it
    )


def guard(daemon: MpsDaemon, owner: int) -> None:
    """Wait for the end of ``owner``, then stop the daemon."""
    try:
        fd = os.pidfd_open(owner)
    except ProcessLookupError:  # it has ended already
        pass
    else:
        select.select([fd], [], [])
    daemon.stop()


if __name__ == "__main__":
    guard(MpsDaemon(Path(sys.argv[1]), Path(sys.argv[2]), True, PROGRAM), int(sys.argv[3]))

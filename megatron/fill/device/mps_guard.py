"""A process that stops a run's MPS daemon when the run is over, however it ended.

A rank cannot do that: it is a client until it ends, and the daemon waits for its clients.

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
    """Start a process that stops our daemon when the process ``owner`` ends."""
    return subprocess.Popen(
        [sys.executable, "-m", "megatron.fill.device.mps_guard", str(daemon.pipe), str(daemon.log), str(owner)],
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # it must not get Ctrl-C
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

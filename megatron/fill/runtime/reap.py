"""Ends whatever came to this process from a child that died: it must have adopted orphans (``host.adopt_orphans``).

What this process starts for itself stays in its process group, and is none of that.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection

from megatron.fill.device.tree import children, descendants, read_process

_WITHIN_S = 5.0


def end_descendants(spare: Collection[int] = ()) -> None:
    """End and collect all orphans that came to this process, however they fork.

    Args:
        spare: children that are no orphans though they are in groups of their own.
    """
    end_s = time.monotonic() + _WITHIN_S
    while time.monotonic() < end_s:
        ours = [child for child in children(os.getpid()) if child not in spare and _came(child)]
        if not ours:
            return
        found = [pid for child in ours for pid in (child, *descendants(child))]
        for how in (signal.SIGSTOP, signal.SIGKILL):  # all are stopped first, so that none forks while others die
            for pid in found:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, how)
        for child in ours:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)
        time.sleep(0.005)


def _came(child: int) -> bool:
    process = read_process(child)
    return process is not None and process.group != os.getpgrp()

"""Ends whatever came to this process from a child that died: it must have adopted orphans (``host.adopt_orphans``)."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection

from megatron.fill.device.tree import children, descendants

_WITHIN_S = 5.0


def end_descendants(spare: Collection[int] = ()) -> None:
    """End and collect every descendant of this process but the children in ``spare`` and theirs, however they fork."""
    end_s = time.monotonic() + _WITHIN_S
    while time.monotonic() < end_s:
        ours = [child for child in children(os.getpid()) if child not in spare]
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

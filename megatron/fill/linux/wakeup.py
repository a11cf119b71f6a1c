"""Sleep that every signal with a handler ends, also one that came just before it."""

from __future__ import annotations

import contextlib
import os
import select
import signal


class Wakeup:
    """The pipe into which Python writes a byte for each signal of this process, which has one such object."""

    def __init__(self) -> None:
        self._signalled, wakeup = os.pipe()
        os.set_blocking(self._signalled, False)
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)

    def wait(self, seconds: float, *fds: int) -> bool:
        """Sleep until a signal comes or a descriptor is readable, at most for ``seconds``; True for a descriptor."""
        ready = select.select([self._signalled, *fds], [], [], max(0.0, seconds))[0]
        with contextlib.suppress(BlockingIOError):
            os.read(self._signalled, 4096)
        return any(fd in ready for fd in fds)

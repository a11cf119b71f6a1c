"""Sleep until descriptors are readable, or a signal comes."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Collection

_SELECTABLE = 1024  # glibc's FD_SETSIZE; a training may have more descriptors


def readable(seconds: float | None, *fds: int) -> Collection[int]:
    """Sleep until one of the descriptors is readable or closed, at most for ``seconds``; return those that are."""
    if seconds is not None:
        seconds = max(0.0, seconds)
    if max(fds) < _SELECTABLE:
        return select.select(fds, [], [], seconds)[0]
    poll = select.poll()  # sleeps for whole ms only
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(None if seconds is None else 1000 * seconds)]


class Wakeup:
    """The pipe into which Python writes a byte for each signal of this process, which has one such object."""

    def __init__(self) -> None:
        self._signalled, wakeup = os.pipe()
        os.set_blocking(self._signalled, False)
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)

    def wait(self, seconds: float, *fds: int) -> bool:
        """Sleep until a signal comes or a descriptor is readable, at most for ``seconds``; True for a descriptor."""
        ready = readable(seconds, self._signalled, *fds)
        with contextlib.suppress(BlockingIOError):
            os.read(self._signalled, 4096)
        return any(fd in ready for fd in fds)

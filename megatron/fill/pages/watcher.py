"""A thread that sleeps on a control page and acts on every change of it."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable

from megatron.fill.pages.control import ControlPage, ControlReader, RunState

logger = logging.getLogger(__name__)


class ControlWatcher:
    """Calls back with the state: once at the start, and then after every change.

    A callback that raises is reported and called again with the next change.  Changes that follow one another within
    the callback are seen as one, the last.

    Args:
        page: where the change is acknowledged too, if it is one that can be written.
        act: called in the watcher's thread; a change counts as acknowledged when it returns.
    """

    def __init__(self, page: ControlReader, act: Callable[[RunState], None]) -> None:
        self._page = page
        self._act = act
        self._thread = threading.Thread(target=self._watch, name="control", daemon=True)

    def start(self) -> None:
        """Begin.  The thread ends with the process: asleep in the kernel, it holds nobody up."""
        self._thread.start()

    def _watch(self) -> None:
        # Signals are for the main thread, whose sleep they are to interrupt.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        page = self._page
        while True:
            word = page.word
            try:
                self._act(RunState(word & 3))
            except Exception:
                logger.exception("acting on %s failed", RunState(word & 3).name)
            else:
                if isinstance(page, ControlPage):
                    page.acknowledge(word)
            while page.word == word:
                page.wait(word)

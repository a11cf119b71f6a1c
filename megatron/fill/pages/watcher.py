"""A thread that sleeps on a control page and acts on every change of it."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable

from megatron.fill.pages.control import ControlPage, ControlReader, RunState

logger = logging.getLogger(__name__)


def watch_control(page: ControlReader, act: Callable[[RunState], None]) -> None:
    """Call ``act`` in a daemon thread, with the state once at the start, and after every change.

    A call that returns counts as acknowledged, if the page is writable; one that raises is logged.  Of several changes
    during one call, only the last is seen.
    """

    def watch() -> None:
        # Signals go to the main thread, whose sleep they must interrupt.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            word = page.word
            try:
                act(RunState(word & 3))
            except Exception:
                logger.exception("acting on %s failed", RunState(word & 3).name)
            else:
                if isinstance(page, ControlPage):
                    page.acknowledge(word)
            while page.word == word:
                page.wait(word)

    threading.Thread(target=watch, name="control", daemon=True).start()

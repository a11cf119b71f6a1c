"""Waiting for what comes when it comes: on a busy machine late."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(condition: Callable[[], object], seconds: float = 120) -> None:
    """Wait until it holds; fail the test if it never does."""
    end_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_s, "it never came"
        time.sleep(0.005)

"""Waiting for what comes when it comes: on a busy machine late."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(
    condition: Callable[[], object],
    seconds: float = 120,
    every_s: float = 0.005,
    late: Callable[[], str] = lambda: "it never came",
) -> None:
    """Wait until it holds, looking so often; fail the test if it never does, saying what ``late`` says."""
    end_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_s, late()
        time.sleep(every_s)

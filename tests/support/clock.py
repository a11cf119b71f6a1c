"""A clock that a test sets."""

from __future__ import annotations


class Clock[Time: (int, float)]:
    """Called as the clocks of the code under test are; its time is in their unit."""

    def __init__(self, now: Time) -> None:
        self.now: Time = now

    def __call__(self) -> Time:
        return self.now

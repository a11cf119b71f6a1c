"""What the driver of a chaos run did, and saw."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deed:
    """A fault that was injected from outside, and verified.

    Attributes:
        start_ns, end_ns: from when to when, in CLOCK_MONOTONIC.
        rank: whose; None for everyone's.
        wrong: what should not have come of it; ``""`` if all is well.
    """

    kind: str
    start_ns: int
    end_ns: int
    rank: int | None = None
    wrong: str = ""

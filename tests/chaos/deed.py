"""The driver's actions in a chaos run, with what it observed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deed:
    """A fault that was injected from outside, and verified.

    Attributes:
        start_ns, end_ns: beginning and end of the fault, in CLOCK_MONOTONIC.
        rank: rank that the fault hit; None for all ranks.
        wrong: harm that was observed; ``""`` if none was.
    """

    kind: str
    start_ns: int
    end_ns: int
    rank: int | None = None
    wrong: str = ""

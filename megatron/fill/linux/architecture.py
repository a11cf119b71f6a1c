"""The processor architectures on which bubbles can be filled."""

from __future__ import annotations

import platform


def unordered(machine: str | None = None) -> str:
    """The reason why shared pages cannot be read without locks on this architecture; empty if they can.

    x86-64 keeps stores in order.  aarch64 and ppc64le need a memory barrier, which Python does not have.

    Args:
        machine: architecture as in ``uname -m``; None for this machine's.
    """
    machine = machine or platform.machine()
    if machine == "x86_64":
        return ""
    return f"this processor is {machine}, which reorders stores to shared memory; expected x86_64"

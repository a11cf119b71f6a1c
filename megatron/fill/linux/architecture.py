"""The processor architectures on which bubbles can be filled."""

from __future__ import annotations

import platform


def unordered(machine: str | None = None) -> str:
    """Why shared pages cannot be read without locks on this architecture, or '' where they can.

    XX
      x86-64 keeps in order.  Python has no memory barrier, and aarch64 and ppc64le need one.

      Args:
          machine: architecture as in ``uname -m``, or None for this machine's.
    """
    machine = machine or platform.machine()
    if machine == "x86_64":
        return ""
    return f"this processor is {machine}, which reorders stores to shared memory; expected x86_64"

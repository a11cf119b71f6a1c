"""A shared gloo device for all process groups of a rank.

By default torch creates a device for each group, with a thread that wakes up a hundred times a second even when idle.
Megatron creates about twenty groups, and here all of a rank's threads share one core.
"""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from typing import Any

import torch.distributed.distributed_c10d as c10d

from pipefill_patches.patch import replace

_THREADS = 2  # threads for asynchronous operations, for each device of a group; torch's own default


def install(stack: contextlib.ExitStack) -> None:
    """Make the groups created until ``stack`` is closed share their devices."""
    gloo: Any = c10d.ProcessGroupGloo
    devices: dict[int, list[Any]] = {}  # by process: a fork inherits its parent's devices, but not their threads

    def options(timeout: Any = c10d.default_pg_timeout, **others: Any) -> Any:
        """Return options with the shared devices; None for arguments that torch itself has to handle, or refuse."""
        if not isinstance(timeout, timedelta):
            return None
        try:
            process = os.getpid()
            if process not in devices:
                devices[process] = _new_devices(gloo)
            its = gloo._Options()
            its._devices, its._threads, its._timeout = devices[process], _THREADS * len(devices[process]), timeout
            for name, value in others.items():
                setattr(its, name, value)
        except (AttributeError, RuntimeError, TypeError, ValueError):
            return None
        return its

    class SharingGloo(gloo):
        def __init__(self, store: Any, rank: int, size: int, *given: Any, **named: Any) -> None:
            shared = options(*given, **named) if len(given) < 2 else None
            if shared is None:
                super().__init__(store, rank, size, *given, **named)
            else:
                super().__init__(store, rank, size, shared)

    replace(stack, c10d, "ProcessGroupGloo", SharingGloo)


def _new_devices(gloo: Any) -> list[Any]:
    """Create the devices as torch does for a group: for the named interfaces, else for the host's name."""
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not interfaces:
        return [gloo.create_default_device()]
    return [gloo.create_device(interface=name) for name in interfaces.removesuffix(",").split(",")]

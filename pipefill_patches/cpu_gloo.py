"""One gloo device for all process groups of a rank.

By itself torch makes a device for each group, with a thread that wakes up a hundred times a second whether or not
there is anything to do.  Megatron makes about twenty groups, and here all of a rank's threads share one core.
"""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from typing import Any

import torch.distributed.distributed_c10d as c10d

from pipefill_patches.registry import replace

_THREADS = 2  # for each device of a group, for what is asked of it asynchronously; torch's own default


def install(stack: contextlib.ExitStack) -> None:
    """Let the groups that are made until ``stack`` is closed share their devices."""
    gloo: Any = c10d.ProcessGroupGloo
    devices: dict[int, list[Any]] = {}  # by process: a fork has the devices of its parent, but not their threads

    def options(timeout: Any = c10d.default_pg_timeout, **others: Any) -> Any:
        """With the shared devices; None for what torch itself is to make, or to refuse."""
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
    """Those that a group of torch's would make: of the interfaces that are named, else of the host's name."""
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not interfaces:
        return [gloo.create_default_device()]
    return [gloo.create_device(interface=name) for name in interfaces.removesuffix(",").split(",")]

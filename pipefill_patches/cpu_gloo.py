"""One gloo device for all process groups of a rank.

By itself torch makes a device for each group, with a thread that wakes up a hundred times a second whether or not
there is anything to do.  Megatron makes about twenty groups, and here all of a rank's threads share one core.
"""

from __future__ import annotations

import contextlib
import functools
import os
from datetime import timedelta
from typing import Any

import torch.distributed.distributed_c10d as c10d

from pipefill_patches.registry import replace

_THREADS = 2  # of each group, for what is asked of it asynchronously; torch's own default


@functools.cache
def _devices(process: int) -> list[Any]:
    """Those that a group of torch's would make: of the interfaces that are named, else of the host's name.

    Args:
        process: this one; a fork has the devices of its parent, but not their threads.
    """
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    gloo = c10d.ProcessGroupGloo
    if not interfaces:
        return [gloo.create_default_device()]
    return [gloo.create_device(interface=name) for name in interfaces.split(",")]


def install(stack: contextlib.ExitStack) -> None:
    """Let the groups that are made until ``stack`` is closed share their devices."""
    gloo: Any = c10d.ProcessGroupGloo

    class SharingGloo(gloo):
        def __init__(
            self, store: Any, rank: int, size: int, timeout: timedelta = c10d.default_pg_timeout, **others: Any
        ) -> None:
            options = gloo._Options()
            options._devices, options._threads, options._timeout = _devices(os.getpid()), _THREADS, timeout
            for name, value in others.items():
                setattr(options, name, value)
            super().__init__(store, rank, size, options)

    replace(stack, c10d, "ProcessGroupGloo", SharingGloo)

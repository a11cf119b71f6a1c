"""A free port for the rendezvous of a training's ranks."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def free_port() -> Iterator[int]:
    """Reserve a port of this machine for rank 0: in the meantime, the kernel assigns it to no other process."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # rank 0, which listens there, does the same
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]

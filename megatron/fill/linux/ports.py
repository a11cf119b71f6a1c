"""A port for the ranks of a training to meet at."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def free_port() -> Iterator[int]:
    """A port of this machine for rank 0: nobody gets it meanwhile but who asks for it by its number."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as who listens there does
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]

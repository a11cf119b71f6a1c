"""A network of a chaos run's own: a loopback interface that can be taken down, and an abstract socket to find."""

from __future__ import annotations

import fcntl
import os
import socket
import struct

_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1
_NAME = "\0pipefill-chaos"
_FLAGS = struct.Struct("16sH14x")


class OwnNetwork:
    """The network namespace of this process and its descendants from now on.  Create it before any thread.

    Attributes:
        machine: inode of the machine's namespace, which was left.
        why_not: reason why this is still the machine's namespace; ``""`` if it is not.
    """

    def __init__(self) -> None:
        self.machine = os.stat("/proc/self/ns/net").st_ino
        self.why_not = _leave()
        self._stranger = socket.socket(socket.AF_UNIX)  # stands for another program on the node
        if not self.why_not:
            self._stranger.bind(_NAME)
            self._stranger.listen()

    def close(self) -> None:
        """Close the socket; the namespace ends with its last process."""
        self._stranger.close()


def _leave() -> str:
    if os.geteuid() != 0:
        return "only root can make a network of its own"
    try:
        os.unshare(os.CLONE_NEWNET)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            _, flags = _FLAGS.unpack(fcntl.ioctl(any_socket, _GET_FLAGS, _FLAGS.pack(b"lo", 0)))
            fcntl.ioctl(any_socket, _SET_FLAGS, _FLAGS.pack(b"lo", flags | _UP))
    except OSError as error:
        return f"no network can be made: {error.strerror}"
    return ""

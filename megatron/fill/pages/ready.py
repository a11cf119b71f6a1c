"""The number of transfers that each other rank has ready for this one, in words that a node's ranks and GPUs map."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets

from megatron.fill.linux import memfd


class ReadyPage:
    """A rank's page, mapped by its owner or by another rank of the same user; OSError if there is none on this node.

    Attributes:
        words: number of transfers that each rank has ready; GPUs write these and wait for them.
        gone: 1 for each rank that announces no more transfers; read and written by hosts.
        address: address of the first word; one word of 4 bytes for each rank.
        size: size in bytes, whole pages.
    """

    def __init__(self, path: str, ranks: int) -> None:
        self.path = path
        self.size = _size(ranks)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            view, self.address = memfd.map_page(fd, self.size, writable=True)
        finally:
            os.close(fd)
        words = view.cast("I")
        self.words, self.gone = words[:ranks], words[ranks : 2 * ranks]

    @classmethod
    def create(cls, ranks: int) -> ReadyPage:
        """Create a page for this rank, all zero, with two words for each of ``ranks``."""
        # All ranks of the node can open a file there; its name is removed once they have.
        path = f"/dev/shm/pipefill-ready-{os.getpid()}-{secrets.token_hex(8)}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, _size(ranks))
        finally:
            os.close(fd)
        return cls(path, ranks)

    def forget(self) -> None:
        """Remove the file's name: no other process can open it from now on."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)


def _size(ranks: int) -> int:
    return -(-8 * ranks // mmap.PAGESIZE) * mmap.PAGESIZE

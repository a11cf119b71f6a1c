"""How many transfers each other rank has ready for this one: words that all ranks of a node map, and their GPUs too."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets

from megatron.fill.linux import memfd

_FOLDER = "/dev/shm"  # a file that all ranks of the node can open until they have


class ReadyPage:
    """One rank's page, as its owner or another rank of its user has it mapped.

    Args:
        path: its file; ``create`` makes it.
        ranks: of the training: two words each.

    Attributes:
        words: how many transfers each rank has ready; GPUs write and wait for these.
        gone: of each rank, whether it announces nothing any more; for hosts.
        address: of the first word; the words of the ranks follow each other, 4 bytes each.
        size: in bytes, whole pages.

    Raises:
        OSError: there is no such file here, or it is another user's.
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
        """A new page of this rank, all zero."""
        path = f"{_FOLDER}/pipefill-ready-{os.getpid()}-{secrets.token_hex(8)}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, _size(ranks))
        finally:
            os.close(fd)
        return cls(path, ranks)

    def forget(self) -> None:
        """Take its name away: nobody else can open it from now on."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)


def _size(ranks: int) -> int:
    return -(-8 * ranks // mmap.PAGESIZE) * mmap.PAGESIZE

"""Waits for other stages that leave the GPU free (``--fill-free-waits``).

NCCL receives with a kernel that spins on its multiprocessor until the data comes.  So under time-slicing a rank that
only waits keeps its time slices, and a job has half of the bubble at most.  Here a receive is held up in its stream, by
a wait of the GPU's front end for a word in host memory (``cuStreamWaitValue32``), until the sender's stream has reached
its send and has written that word (``cuStreamWriteValue32``).

The word counts the transfers of one sender, in the order of their posting, in which NCCL matches them.  Each rank
announces all that it sends in a call before it holds up any receive of that call, on the stream that computed the data:
no later than the send itself would begin, so a held receive begins no later than it could have made progress
(docs/cuda.md shows why this cannot deadlock).  If an unforeseen schedule deadlocks anyway, or a sender has ended, the
guard releases the receive: it then waits as NCCL does, with NCCL's own timeout.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from megatron.fill.errors import FillError
from megatron.fill.pages.ready import ReadyPage
from megatron.fill.rank.signals import Driver

logger = logging.getLogger("pipefill")

HELD_S = 30.0  # time after which a receive is released if its sender announces nothing
MOST_RELEASES = 3  # number of such releases after which this rank holds up no receive any more
_LOOK_S = 1.0
_CYCLE = 1 << 32  # the words' values are compared modulo this
_FAR = 1 << 30  # number of transfers that exceeds all in flight
_MAPPED = 2 | 1  # CU_MEMHOSTREGISTER_DEVICEMAP, CU_MEMHOSTREGISTER_PORTABLE
_GEQ = 0  # CU_STREAM_WAIT_VALUE_GEQ
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


class Streams(Protocol):
    """The stream operations that free waits need."""

    def write(self, page: ReadyPage, index: int, value: int) -> None:
        """Enqueue the write of a word in the current stream."""

    def held(self, sender: int, value: int) -> AbstractContextManager[None]:
        """Make a stream for this sender current in the block.

        It continues after the work in the present stream, and once the sender's word of the own page has reached
        ``value``.
        """


@dataclass(eq=False, repr=False)
class FreeWaits:
    """The free waits of one rank."""

    streams: Streams
    own: ReadyPage  # this rank's page
    others: Mapping[int, ReadyPage]  # pages of the other ranks on this node; transfers beyond it are not changed
    rank: int

    def __post_init__(self) -> None:
        self._sent: defaultdict[int, int] = defaultdict(int)  # by receiver: number of transfers announced
        self._posted: defaultdict[int, int] = defaultdict(int)  # by sender: number of receives posted
        self._held: dict[int, int] = {}  # by sender: number of the latest receive that is held up
        self._seen: dict[int, tuple[int, float]] = {}  # by sender: its word, and the time of its latest change
        self._releases = 0
        self._told: set[int] = set()  # senders for which the warning that they have ended has been logged
        self._lock = threading.Lock()

    def announce(self, receiver: int) -> None:
        """Announce a send of the current stream's latest result to ``receiver``."""
        page = self.others.get(receiver)
        if page is not None:
            self._sent[receiver] = value = (self._sent[receiver] + 1) % _CYCLE
            self.streams.write(page, self.rank, value)

    def receive(self, sender: int, *, hold: bool = True) -> AbstractContextManager[None]:
        """Return the context to post a receive from ``sender`` in: held up until announced, or only counted."""
        if sender not in self.others:
            return contextlib.nullcontext()
        self._posted[sender] = value = (self._posted[sender] + 1) % _CYCLE
        if not hold or self._releases >= MOST_RELEASES or self._gone(sender):
            return contextlib.nullcontext()
        with self._lock:
            self._held[sender] = value
        return self.streams.held(sender, value)

    def look(self, now_s: float) -> None:
        """Release receives that have been held up for too long; for another thread."""
        for sender in self.others:
            with self._lock:
                due, word = self._held.get(sender), self.own.words[sender]
                if due is None or _reached(word, due):
                    self._seen.pop(sender, None)
                    continue
                if self._gone(sender):
                    self.own.words[sender] = due
                    continue
                seen, since_s = self._seen.setdefault(sender, (word, now_s))
                if seen != word:
                    self._seen[sender] = word, now_s
                elif now_s - since_s >= HELD_S:
                    del self._seen[sender]
                    self._let_go(sender, due)

    def release(self) -> None:
        """Stop holding up and announcing, at the training's end or if the driver refuses; notify the others."""
        for receiver, page in self.others.items():
            # A stream's pending write may follow and set a lower value; then the other rank's guard releases it.
            page.words[self.rank] = (self._sent[receiver] + _FAR) % _CYCLE
            page.gone[self.rank] = 1
        self._releases = MOST_RELEASES
        with self._lock:
            for sender, due in self._held.items():
                if not _reached(self.own.words[sender], due):
                    self.own.words[sender] = due

    def _gone(self, sender: int) -> bool:
        gone = bool(self.own.gone[sender])
        if gone and sender not in self._told:
            self._told.add(sender)
            logger.warning(
                "rank %d: rank %d announces nothing any more, so receives from it wait as NCCL does", self.rank, sender
            )
        return gone

    def _let_go(self, sender: int, due: int) -> None:
        self.own.words[sender] = due
        self._releases += 1
        off = "; no receive of this rank is held up any more" if self._releases == MOST_RELEASES else ""
        logger.warning(
            "rank %d: nothing has come from rank %d for %.0f s, so its receive waits as NCCL does%s",
            self.rank,
            sender,
            HELD_S,
            off,
        )


def _reached(word: int, due: int) -> bool:
    """True if the GPU's comparison (GEQ, modulo 2^32) ends a wait for ``due``."""
    return (word - due) % _CYCLE < _CYCLE // 2


def guard(waits: FreeWaits, ended: threading.Event) -> None:
    """Call ``look`` every second until ``ended`` is set; the body of a thread."""
    while not ended.wait(_LOOK_S):
        waits.look(time.monotonic())


class CudaStreams:
    """The streams of a GPU, such as ``cuda:0``; FillError if the driver refuses, or has no stream memory operations."""

    def __init__(self, device: str, own: ReadyPage, others: Sequence[ReadyPage]) -> None:
        self._device = device
        self._driver = driver = Driver(device)
        try:
            self._write = driver.bind("cuStreamWriteValue32_v2")
            self._wait = driver.bind("cuStreamWaitValue32_v2")
        except AttributeError as error:
            raise FillError(f"the CUDA driver has no stream memory operations: {error}") from error
        self._create = driver.bind("cuStreamCreateWithPriority")
        self._at = {page.address: driver.mapped(page.address, page.size, _MAPPED) for page in (own, *others)}
        self._own = own
        self._sides: dict[int, ctypes.c_void_p] = {}
        self._try()

    def _try(self) -> None:
        """Try the operations once, since a driver may have them but not support them on this device."""
        import torch

        stream, at = self._driver.stream(), ctypes.c_uint64(self._at[self._own.address])
        self._write(stream, at, ctypes.c_uint32(1), 0)
        self._wait(stream, at, ctypes.c_uint32(1), _GEQ)
        self._write(stream, at, ctypes.c_uint32(0), 0)
        torch.cuda.synchronize(self._device)

    def write(self, page: ReadyPage, index: int, value: int) -> None:
        at = ctypes.c_uint64(self._at[page.address] + 4 * index)
        self._write(self._driver.stream(), at, ctypes.c_uint32(value), 0)

    @contextlib.contextmanager
    def held(self, sender: int, value: int) -> Iterator[None]:
        import torch

        self._driver.stream()  # raises if the stream is being captured
        side = self._side(sender)
        stream = torch.cuda.ExternalStream(side.value, device=self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        at = ctypes.c_uint64(self._at[self._own.address] + 4 * sender)
        self._wait(side, at, ctypes.c_uint32(value), _GEQ)
        with torch.cuda.stream(stream):
            yield

    def _side(self, sender: int) -> ctypes.c_void_p:
        """Return the sender's stream; each has its own, so that receives from different senders are independent."""
        side = self._sides.get(sender)
        if side is None:
            side = self._sides[sender] = ctypes.c_void_p()
            self._create(ctypes.byref(side), _NON_BLOCKING, 0)
        return side

"""Waits for other stages that leave the GPU free (--fill-free-waits).

NCCL receives with a kernel that spins on its multiprocessor until the data comes.  So under time-slicing a rank that
only waits keeps its turns, and a job has half of the bubble at most.  Here a receive is held up in its stream, by a
wait of the GPU's front end for a word in host memory (``cuStreamWaitValue32``), until the sender's stream has got to
its send and has written that word (``cuStreamWriteValue32``).  Until then no kernel of the receiver is there.

The word counts the transfers of one sender, in the order of their posting, which is also the order in which NCCL
matches them.  Each rank announces all that it sends in a call before anything of that call is held up, on the stream
that computed it.  An announcement therefore comes no later than the send itself would begin, so a receive that is held
up begins no later than it could have made progress (docs/cuda.md says why nothing waits in a circle).  Should a
schedule that nobody thought of do so all the same, or a sender be gone, the guard lets the receive go: it then waits
as NCCL does, with NCCL's own time-out.
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
from typing import Protocol

from megatron.fill.errors import FillError
from megatron.fill.pages.ready import ReadyPage
from megatron.fill.rank.signals import Driver

logger = logging.getLogger("pipefill")

HELD_S = 30.0  # how long a receive is held up while nothing comes from its sender
MOST_RELEASES = 3  # after as many, this rank holds nothing up any more
_LOOK_S = 1.0
_CYCLE = 1 << 32  # the words' values are compared modulo this
_FAR = 1 << 30  # more transfers than any training has in flight
_MAPPED = 2 | 1  # CU_MEMHOSTREGISTER_DEVICEMAP, CU_MEMHOSTREGISTER_PORTABLE
_GEQ = 0  # CU_STREAM_WAIT_VALUE_GEQ
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


class Streams(Protocol):
    """The device's streams, as far as they are needed here."""

    def write(self, page: ReadyPage, index: int, value: int) -> None:
        """Have the current stream write a word when it gets here."""

    def held(self, source: int, index: int, value: int) -> AbstractContextManager[None]:
        """A stream of this source's that goes on, after what the current one has to do, once the word of the own page
        at ``index`` has got to ``value``; it is the current stream inside."""


class FreeWaits:
    """One rank's.

    Args:
        own: this rank's page.
        others: those of the other ranks of this node; transfers to and from others are left alone.
        rank: this one.
    """

    def __init__(self, streams: Streams, own: ReadyPage, others: Mapping[int, ReadyPage], rank: int) -> None:
        self._streams = streams
        self._own = own
        self._others = others
        self._rank = rank
        self._sent: defaultdict[int, int] = defaultdict(int)  # by receiver: transfers announced
        self._posted: defaultdict[int, int] = defaultdict(int)  # by sender: receives posted
        self._held: dict[int, int] = {}  # by sender: the last receive that is held up
        self._seen: dict[int, tuple[int, float]] = {}  # by sender: its word, and when it was seen to change
        self._releases = 0
        self._told: set[int] = set()  # of which senders it was said that they announce nothing any more
        self._lock = threading.Lock()

    def announce(self, receiver: int) -> None:
        """What the current stream computed last is about to be sent to this rank."""
        page = self._others.get(receiver)
        if page is not None:
            self._sent[receiver] = value = (self._sent[receiver] + 1) % _CYCLE
            self._streams.write(page, self._rank, value)

    def receive(self, sender: int, *, hold: bool = True) -> AbstractContextManager[None]:
        """Post a receive from this rank inside.

        Args:
            hold: hold it up until it is announced; else it is only counted.
        """
        if sender not in self._others:
            return contextlib.nullcontext()
        self._posted[sender] = value = (self._posted[sender] + 1) % _CYCLE
        if not hold or self._releases >= MOST_RELEASES or self._gone(sender):
            return contextlib.nullcontext()
        with self._lock:
            self._held[sender] = value
        return self._streams.held(sender, sender, value)

    def look(self, now_s: float) -> None:
        """Let go what has been held up for too long; for another thread."""
        for sender in self._others:
            with self._lock:
                due, word = self._held.get(sender), self._own.words[sender]
                if due is None or _reached(word, due):
                    self._seen.pop(sender, None)
                    continue
                if self._gone(sender):
                    self._own.words[sender] = due
                    continue
                seen, since_s = self._seen.setdefault(sender, (word, now_s))
                if seen != word:
                    self._seen[sender] = word, now_s
                elif now_s - since_s >= HELD_S:
                    del self._seen[sender]
                    self._let_go(sender, due)

    def release(self) -> None:
        """Hold nothing up and announce nothing any more, for the end of the training or a driver that refuses: others
        are told."""
        for receiver, page in self._others.items():
            # What the streams still have to write may come after this and be less: then the other's guard sees to it.
            page.words[self._rank] = (self._sent[receiver] + _FAR) % _CYCLE
            page.gone[self._rank] = 1
        self._releases = MOST_RELEASES
        with self._lock:
            for sender, due in self._held.items():
                if not _reached(self._own.words[sender], due):
                    self._own.words[sender] = due

    def _gone(self, sender: int) -> bool:
        gone = bool(self._own.gone[sender])
        if gone and sender not in self._told:
            self._told.add(sender)
            logger.warning(
                "rank %d: rank %d announces nothing any more, so receives from it wait as NCCL does", self._rank, sender
            )
        return gone

    def _let_go(self, sender: int, due: int) -> None:
        self._own.words[sender] = due
        self._releases += 1
        off = "; no receive of this rank is held up any more" if self._releases == MOST_RELEASES else ""
        logger.warning(
            "rank %d: nothing has come from rank %d for %.0f s, so its receive waits as NCCL does%s",
            self._rank,
            sender,
            HELD_S,
            off,
        )


def _reached(word: int, due: int) -> bool:
    """Whether the GPU's comparison lets a wait for ``due`` go."""
    return (word - due) % _CYCLE < _CYCLE // 2


def guard(waits: FreeWaits, ended: threading.Event) -> None:
    """Look every second, from a thread, until this is set."""
    while not ended.wait(_LOOK_S):
        waits.look(time.monotonic())


class CudaStreams:
    """Streams of a GPU.

    Args:
        device: such as ``cuda:0``.
        own, others: the pages, as ``FreeWaits`` has them.

    Raises:
        FillError: the driver refuses, or does not know stream memory operations.
    """

    def __init__(self, device: str, own: ReadyPage, others: Sequence[ReadyPage]) -> None:
        self._device = device
        self._driver = driver = Driver(device)
        try:
            self._write = driver.bind("cuStreamWriteValue32_v2")
            self._wait = driver.bind("cuStreamWaitValue32_v2")
        except AttributeError as error:
            raise FillError(f"the CUDA driver has no stream memory operations: {error}") from error
        self._register = driver.bind("cuMemHostRegister_v2")
        self._address = driver.bind("cuMemHostGetDevicePointer_v2")
        self._create = driver.bind("cuStreamCreateWithPriority")
        self._at = {page.address: self._mapped(page) for page in (own, *others)}
        self._own = own
        self._sides: dict[int, ctypes.c_void_p] = {}
        self._try()

    def _try(self) -> None:
        """A driver may know these operations and not do them on this device."""
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
    def held(self, source: int, index: int, value: int) -> Iterator[None]:
        import torch

        self._driver.stream()  # raises where it is being captured
        side = self._side(source)
        stream = torch.cuda.ExternalStream(side.value, device=self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        at = ctypes.c_uint64(self._at[self._own.address] + 4 * index)
        self._wait(side, at, ctypes.c_uint32(value), _GEQ)
        with torch.cuda.stream(stream):
            yield

    def _side(self, source: int) -> ctypes.c_void_p:
        """A stream for each sender: what comes from one is not to wait for what comes from another."""
        side = self._sides.get(source)
        if side is None:
            side = self._sides[source] = ctypes.c_void_p()
            self._create(ctypes.byref(side), _NON_BLOCKING, 0)
        return side

    def _mapped(self, page: ReadyPage) -> int:
        self._register(ctypes.c_void_p(page.address), ctypes.c_size_t(page.size), _MAPPED)
        at = ctypes.c_uint64()
        self._address(ctypes.byref(at), ctypes.c_void_p(page.address), 0)
        return at.value

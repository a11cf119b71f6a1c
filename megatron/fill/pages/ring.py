"""The ring: facts on their way from the rank to its relay, in shared memory.

The rank writes a fact when its Python comes by, which may be long before the GPU does.  Most facts are *marked*: a
signal is put into the stream behind what was enqueued so far, and posts the ring's semaphore, or writes the mark's
number, when the GPU gets there.  The others need no time of their own and ride on the next mark.  Every entry says with
which mark it is due, so the relay knows what each signal stands for.

The rank never waits: a relay that falls behind by more than the ring holds finds its entries overwritten, and knows
how many.  Layout, in 64-bit words, then entries of 64 bytes from byte 4096 on::

    0  magic and version    1  entries begun    2  1 when the rank has switched off    3  1 when the relay listens
    4  the number of the last mark that the GPU has reached, where marks are written    5  1 where they are
    8..15  the semaphore

An entry is visible before its signal can fire: between them are a launch and the GPU, which order memory.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
import time
from dataclasses import dataclass
from enum import IntEnum

from megatron.fill.errors import FillError
from megatron.fill.linux import memfd, semaphore

_MAGIC = 0x50495045_52000001
_VERSION, _BEGUN, _OFF, _LISTENING, _REACHED, _WRITTEN = range(6)
_LOOK_S = 20e-6  # between two looks for a mark that is written
_SEMAPHORE_AT = 64
_ENTRIES_AT = 4096
_ENTRY = struct.Struct("=QQIiqq24s")
_TEXT_BYTES = 24
CAPACITY = 4096  # entries; an iteration of 64 microbatches takes some 400


class Fact(IntEnum):
    """What the bus reported."""

    ITERATION_STARTED = 1  # number: the iteration; free_bytes: what is missing of the training's own memory margin
    ITERATION_ENDED = 2
    CYCLE_STARTED = 3  # text: the schedule; index: microbatches; number: chunks, negative for forward only
    CYCLE_ENDED = 4
    BUBBLE_OPENED = 5  # text: the kind; index: in the cycle; free_bytes: as its author promised, negative without
    BUBBLE_CLOSED = 6
    COMPUTED = 7  # text: forward or backward
    DISTURBED = 8  # text: by what
    END = 9  # of the training


@dataclass(frozen=True, slots=True)
class Entry:
    """One fact.  ``due`` is the number, from 1, of the mark that it comes with."""

    due: int
    fact: Fact
    index: int = 0
    number: int = 0
    free_bytes: int = 0
    text: str = ""


class Ring:
    """The rank's end.

    Attributes:
        fd: to pass on to the relay.
        semaphore: the address of the semaphore that a posted mark posts once.
        header: the address and the size of the pages that hold it and all other words.
        reached: the address of the 64-bit word in them into which a written mark writes its number, from 1.
    """

    def __init__(self) -> None:
        self.fd = memfd.create("ring", _ENTRIES_AT + CAPACITY * _ENTRY.size)
        self._map = mmap.mmap(self.fd, 0)
        self._words = memoryview(self._map).cast("Q")
        self.header = _address(self._map), _ENTRIES_AT
        self.semaphore = self.header[0] + _SEMAPHORE_AT
        self.reached = self.header[0] + 8 * _REACHED
        semaphore.create(self.semaphore)
        self._begun = 0
        self._marks = 0
        self._words[_VERSION] = _MAGIC

    def write(
        self,
        fact: Fact,
        index: int = 0,
        number: int = 0,
        free_bytes: int = 0,
        text: str = "",
        *,
        marked: bool = True,
    ) -> None:
        """Put a fact in.  The caller puts a signal into the stream next if it is ``marked``."""
        self._begun = begun = self._begun + 1
        due = self._marks + 1
        if marked:
            self._marks = due
        self._words[_BEGUN] = begun  # before the slot changes, so that a relay in the middle of reading it can tell
        at = _ENTRIES_AT + (begun % CAPACITY) * _ENTRY.size
        _ENTRY.pack_into(self._map, at, begun, due, fact, index, number, free_bytes, text.encode()[:_TEXT_BYTES])

    @property
    def written(self) -> bool:
        """Whether marks are written, and not posted; set before anybody listens."""
        return self._words[_WRITTEN] != 0

    @written.setter
    def written(self, written: bool) -> None:
        self._words[_WRITTEN] = written

    @property
    def heard(self) -> bool:
        """Whether the relay listens."""
        return self._words[_LISTENING] != 0

    def switch_off(self) -> None:
        """Tell the relay, out of order, that nothing more comes."""
        self._words[_OFF] = 1
        semaphore.post(self.semaphore)


class RingReader:
    """The relay's end, over the descriptor that the rank passed on.

    Attributes:
        lost: entries that were overwritten before they were read.

    Raises:
        FillError: the descriptor is not a ring of this version.
    """

    def __init__(self, fd: int) -> None:
        try:
            self._map = mmap.mmap(fd, 0)
        except (OSError, ValueError) as error:
            raise FillError(f"descriptor {fd} cannot be mapped as a ring: {error}") from error
        self._words = memoryview(self._map).cast("Q")
        if self._words[_VERSION] != _MAGIC:
            raise FillError(f"descriptor {fd} is not a ring: found {self._words[_VERSION]:#x}, expected {_MAGIC:#x}")
        self._semaphore = _address(self._map) + _SEMAPHORE_AT
        self._next = 1
        self._marks = 0
        self.lost = 0

    @property
    def off(self) -> bool:
        """Whether the rank has switched off: what is left means nothing."""
        return self._words[_OFF] != 0

    def listen(self) -> None:
        """Tell the rank that its facts are heard from now on."""
        self._words[_LISTENING] = 1

    def wait(self) -> None:
        """Sleep until the next signal; ``take`` what it stands for then.  It also ends when the rank switches off."""
        words, marks = self._words, self._marks
        if not words[_WRITTEN]:
            semaphore.wait(self._semaphore)
            return
        while words[_REACHED] <= marks and not words[_OFF]:
            time.sleep(_LOOK_S)

    def take(self) -> list[Entry]:
        """The entries that come with the next mark, in order; those that are ``lost`` are missing."""
        self._marks += 1
        taken: list[Entry] = []
        while True:
            number, due, fact, index, value, free_bytes, text = _ENTRY.unpack_from(
                self._map, _ENTRIES_AT + (self._next % CAPACITY) * _ENTRY.size
            )
            begun = self._words[_BEGUN]
            if begun - self._next >= CAPACITY:
                # Go on in the middle, so that the rank does not overtake again at once.
                self.lost += begun - CAPACITY // 2 - self._next
                self._next = begun - CAPACITY // 2
            elif number != self._next or due > self._marks:
                return taken
            else:
                self._next += 1
                name = text.rstrip(b"\0").decode(errors="replace")
                taken.append(Entry(due, Fact(fact), index, value, free_bytes, name))


def _address(shared: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(shared))

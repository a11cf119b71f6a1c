"""The ring: a buffer of facts in shared memory, which the rank writes and its relay reads.

The rank writes a fact when its Python code reaches it, which may be long before the GPU does.  Most facts are *marked*:
a signal is put into the stream behind everything enqueued so far, and posts the ring's semaphore, or writes the mark's
number, when the GPU reaches it.  The other facts need no time of their own and are delivered with the next mark.  Every
entry holds the number of its mark, so the relay knows which facts a signal stands for.

The rank never waits: if the relay falls behind by more than the ring holds, entries are overwritten, and the relay
counts them.  Layout, in 64-bit words, then entries of 64 bytes from byte 4096 on::

    0  magic and version    1  entries begun    2  1 when the rank has switched off    3  1 when the relay listens
    4  number of the last mark that the GPU has reached, if marks are written    5  1 if they are
    8..15  the semaphore

An entry is visible before its signal can fire: between them are a launch and the GPU, which order memory.  The relay
looks at the next entry, too, which the rank may be writing: an entry's number is its first word, and written last.
"""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass
from enum import IntEnum

from megatron.fill.errors import FillError
from megatron.fill.linux import memfd, semaphore

_MAGIC = 0x50495045_52000001
_VERSION, _BEGUN, _OFF, _LISTENING, _REACHED, _WRITTEN = range(6)
_LOOK_S = 20e-6  # polling interval for written marks
_SEMAPHORE_AT = 64
_ENTRIES_AT = 4096
_WORD_BYTES = 8
_ENTRY_BYTES = 64
_FIELDS = struct.Struct("=QIiqq24s")  # behind an entry's number; struct clears them all before it writes them in turn
_TEXT_BYTES = 24
CAPACITY = 4096  # entries; an iteration of 64 microbatches takes some 400
_BYTES = _ENTRIES_AT + CAPACITY * _ENTRY_BYTES


class Fact(IntEnum):
    """The kinds of facts; each comment lists the fields of ``Entry`` that it uses."""

    ITERATION_STARTED = 1  # number: the iteration; amount: bytes missing in the training's own memory margin
    ITERATION_ENDED = 2
    CYCLE_STARTED = 3  # text: the schedule; index: microbatches; number: chunks, < 0: forward only; amount: group size
    BUBBLE_OPENED = 4  # text: the kind; index: place in the cycle; amount: free memory announced, negative if none
    BUBBLE_CLOSED = 5
    COMPUTED = 6  # text: forward or backward
    DISTURBED = 7  # text: the cause
    END = 8  # the training is over


@dataclass(frozen=True, slots=True)
class Entry:
    """A fact in the ring.  ``due`` is the number, from 1, of the mark with which it is delivered."""

    due: int
    fact: Fact
    index: int = 0
    number: int = 0
    amount: int = 0
    text: str = ""


class Ring:
    """The rank's end of a new ring.

    Attributes:
        fd: descriptor to pass to the relay.
        semaphore: address of the semaphore that each posted mark posts once.
        header: address and size in bytes of the pages that hold the semaphore and all other words.
        reached: address of the 64-bit word into which a written mark writes its number, from 1.
    """

    def __init__(self) -> None:
        self.fd = memfd.create("ring", _BYTES)
        # Mapped until the process ends: the driver keeps an address registered, and would refuse (code 712) whatever is
        # mapped there next.
        self._map, address = memfd.map_page(self.fd, _BYTES, writable=True)
        self._words = self._map.cast("Q")
        self.header = address, _ENTRIES_AT
        self.semaphore = address + _SEMAPHORE_AT
        self.reached = address + 8 * _REACHED
        semaphore.create(self.semaphore)
        self._begun = 0
        self._marks = 0
        self._words[_VERSION] = _MAGIC

    def write(
        self, fact: Fact, index: int = 0, number: int = 0, amount: int = 0, text: str = "", *, marked: bool = True
    ) -> None:
        """Write a fact.  If it is ``marked``, the caller puts a signal into the stream next."""
        self._begun = begun = self._begun + 1
        due = self._marks + 1
        if marked:
            self._marks = due
        self._words[_BEGUN] = begun  # before the slot changes, so that a relay in the middle of reading it can tell
        at = _entry_at(begun)
        name = text.encode()[:_TEXT_BYTES]
        _FIELDS.pack_into(self._map, at + _WORD_BYTES, due, fact, index, number, amount, name)
        self._words[at // _WORD_BYTES] = begun

    @property
    def written(self) -> bool:
        """True if marks are written, and not posted; set before the relay listens."""
        return self._words[_WRITTEN] != 0

    @written.setter
    def written(self, written: bool) -> None:
        self._words[_WRITTEN] = written

    @property
    def heard(self) -> bool:
        return self._words[_LISTENING] != 0

    def switch_off(self) -> None:
        """Notify the relay, out of order, that no more facts come."""
        self._words[_OFF] = 1
        semaphore.post(self.semaphore)


class RingReader:
    """The relay's end of a ring, over the descriptor that the rank passed on; FillError if that is of no ring.

    Attributes:
        lost: number of entries that were overwritten before they were read.
    """

    def __init__(self, fd: int) -> None:
        try:
            self._map, address = memfd.map_page(fd, _BYTES, writable=True)
        except OSError as error:
            raise FillError(f"descriptor {fd} cannot be mapped as a ring: {error}") from error
        self._words = self._map.cast("Q")
        if self._words[_VERSION] != _MAGIC:
            raise FillError(f"descriptor {fd} is not a ring: found {self._words[_VERSION]:#x}, expected {_MAGIC:#x}")
        self._semaphore = address + _SEMAPHORE_AT
        self._next = 1
        self._marks = 0
        self.lost = 0

    @property
    def off(self) -> bool:
        """True if the rank has switched off: entries that are left mean nothing."""
        return self._words[_OFF] != 0

    def listen(self) -> None:
        """Notify the rank that the relay reads its facts from now on."""
        self._words[_LISTENING] = 1

    def wait(self) -> None:
        """Sleep until the next signal, whose facts ``take`` returns, or until the rank switches off."""
        words, marks = self._words, self._marks
        if not words[_WRITTEN]:
            semaphore.wait(self._semaphore)
            return
        while words[_REACHED] <= marks and not words[_OFF]:
            time.sleep(_LOOK_S)

    def take(self) -> list[Entry]:
        """Take the entries of the next mark, in order; entries that were overwritten are missing (``lost``)."""
        self._marks += 1
        taken: list[Entry] = []
        while True:
            at = _entry_at(self._next)
            number = self._words[at // _WORD_BYTES]
            due, fact, index, value, amount, text = _FIELDS.unpack_from(self._map, at + _WORD_BYTES)
            begun = self._words[_BEGUN]
            if begun - self._next >= CAPACITY:
                # Resume in the middle, so that the rank does not overtake again at once.
                self.lost += begun - CAPACITY // 2 - self._next
                self._next = begun - CAPACITY // 2
            elif number != self._next or due > self._marks:
                return taken
            else:
                self._next += 1
                name = text.rstrip(b"\0").decode(errors="replace")
                taken.append(Entry(due, Fact(fact), index, value, amount, name))


def _entry_at(number: int) -> int:
    """Offset in bytes of an entry."""
    return _ENTRIES_AT + (number % CAPACITY) * _ENTRY_BYTES

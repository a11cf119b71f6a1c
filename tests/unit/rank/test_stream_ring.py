"""The ring: what comes with which mark, what is lost, and the semaphore that a host function posts."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Callable
from typing import Any

import pytest

from megatron.fill.errors import FillError, GateError
from megatron.fill.linux import memfd, semaphore
from megatron.fill.pages import ring as ring_module
from megatron.fill.pages.gate import SharedGate, SharedGateReader
from megatron.fill.pages.ring import CAPACITY, Entry, Fact, Ring, RingReader


@pytest.fixture
def ends() -> tuple[Ring, RingReader]:
    ring = Ring()
    return ring, RingReader(ring.fd)


def test_entries_come_in_order_and_with_their_mark(ends):
    ring, reader = ends
    ring.write(Fact.ITERATION_STARTED, number=7)
    ring.write(Fact.BUBBLE_OPENED, 3, amount=1 << 36, text="fwd-bwd")
    ring.write(Fact.DISTURBED, text="evaluation", marked=False)
    ring.write(Fact.BUBBLE_CLOSED)
    assert reader.take() == [Entry(1, Fact.ITERATION_STARTED, number=7)]
    assert reader.take() == [Entry(2, Fact.BUBBLE_OPENED, 3, amount=1 << 36, text="fwd-bwd")]
    # What needs no time of its own rides on the next mark.
    assert reader.take() == [Entry(3, Fact.DISTURBED, text="evaluation"), Entry(3, Fact.BUBBLE_CLOSED)]
    assert reader.lost == 0


def test_an_unmarked_entry_waits_for_the_next_mark(ends):
    ring, reader = ends
    ring.write(Fact.ITERATION_STARTED)
    ring.write(Fact.DISTURBED, text="evaluation", marked=False)
    assert [entry.fact for entry in reader.take()] == [Fact.ITERATION_STARTED]


def test_the_ring_goes_round_without_loss(ends):
    ring, reader = ends
    for number in range(3 * CAPACITY):
        ring.write(Fact.ITERATION_STARTED, number=number)
        assert [entry.number for entry in reader.take()] == [number]
    assert reader.lost == 0


def test_overtaken_entries_are_counted_and_the_others_keep_their_marks(ends):
    ring, reader = ends
    written = 2 * CAPACITY + 10
    for number in range(written):
        ring.write(Fact.ITERATION_STARTED, number=number)
    found = [[entry.number for entry in reader.take()] for _ in range(written)]
    assert reader.lost == written - CAPACITY // 2 - 1
    assert all(numbers in ([], [at]) for at, numbers in enumerate(found))
    assert sum(map(len, found)) == written - reader.lost


def test_a_long_text_is_cut(ends):
    ring, reader = ends
    ring.write(Fact.DISTURBED, text="é" * 100)
    assert reader.take()[0].text == "é" * 12


def test_what_is_no_ring_is_refused():
    with pytest.raises(FillError, match="is not a ring"):
        RingReader(memfd.create("other", 1 << 20))
    with pytest.raises(FillError, match="it has 4096 bytes; expected"):
        RingReader(SharedGate().fd)
    with open("/dev/null") as nothing, pytest.raises(FillError, match="cannot be mapped"):
        RingReader(nothing.fileno())


def test_the_ring_cannot_shrink_under_the_rank():
    with pytest.raises(PermissionError):
        os.ftruncate(Ring().fd, 0)


def test_a_plain_function_pointer_posts_the_semaphore(ends):
    ring, reader = ends
    woken = threading.Event()

    def wait() -> None:
        reader.wait()
        woken.set()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert not woken.wait(0.05)
    # As the driver does it: an address, called with one pointer.
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(semaphore.POST_FUNCTION)(ring.semaphore)
    assert woken.wait(60)


def test_switching_off_wakes_the_relay(ends):
    ring, reader = ends
    assert not reader.off
    ring.switch_off()
    reader.wait()
    assert reader.off


def test_the_rank_hears_that_the_relay_listens(ends):
    ring, reader = ends
    assert not ring.heard
    reader.listen()
    assert ring.heard


def test_a_gate_that_is_passed_on_goes_on_where_it_was():
    first = SharedGate()
    reader = SharedGateReader(first.reader_fd())
    assert first.open(10**18, 0) == 1
    second = SharedGate(first.fd)
    second.close(5)  # opened by the other one
    assert reader.closed_ns(1) == 5
    assert second.open(10**18, 0) == 2
    first.end()
    assert not reader.is_open(2)
    assert reader.ended
    with pytest.raises(GateError, match="is not a gate"):
        SharedGate(Ring().fd)


class WordByWord:
    """A struct that packs as C does it: it clears the whole, then writes its fields in turn; ``look`` comes between."""

    def __init__(self, whole: struct.Struct, look: Callable[[], None]) -> None:
        self._whole, self._look = whole, look
        self.size, self.unpack_from = whole.size, whole.unpack_from

    def pack_into(self, buffer: Any, at: int, *values: Any) -> None:
        packed = self._whole.pack(*values)
        buffer[at : at + self.size] = bytes(self.size)
        for word in range(0, self.size, 8):
            self._look()
            buffer[at + word : at + word + 8] = packed[word : word + 8]
        self._look()


def test_the_relay_takes_no_entry_that_is_written_in_part(ends, monkeypatch):
    ring, reader = ends
    seen: list[Entry] = []

    def look() -> None:
        seen.extend(reader.take())  # as if the device had reached a mark meanwhile

    layouts = {name: one for name, one in vars(ring_module).items() if isinstance(one, struct.Struct)}
    assert layouts
    for name, layout in layouts.items():
        monkeypatch.setattr(ring_module, name, WordByWord(layout, look))
    for number in range(3):
        ring.write(Fact.BUBBLE_OPENED, 3, number, 1 << 36, "fwd-bwd")
        look()
    assert seen == [Entry(1 + number, Fact.BUBBLE_OPENED, 3, number, 1 << 36, "fwd-bwd") for number in range(3)]

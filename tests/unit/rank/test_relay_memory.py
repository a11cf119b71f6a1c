"""The relay's reading of free device memory: by the driver, less what the training could not reserve for itself."""

from __future__ import annotations

import logging

from megatron.fill.device.nvml import Nvml
from megatron.fill.device.port import DeviceError
from megatron.fill.pages.ring import Fact, Ring, RingReader
from megatron.fill.rank import relay
from megatron.fill.rank.relay import FreeMemory, Relay
from megatron.fill.types import BubbleKind
from tests.unit.device.test_cuda import GIB, Library


class Listener:
    """Keeps what is promised in each bubble."""

    def __init__(self) -> None:
        self.promised: list[int | None] = []

    def iteration_started(self, iteration: int, now_ns: int, watched: bool | None = None) -> None:
        """Nothing to keep."""

    def bubble_opened(self, kind: BubbleKind, index: int, now_ns: int, free_bytes: int | None = None) -> None:
        self.promised.append(free_bytes)


def test_what_is_missing_of_the_training_s_margin_is_no_worker_s():
    free, ring, listener = FreeMemory(lambda: 1000), Ring(), Listener()
    reads = Relay(RingReader(ring.fd), listener, free)  # type: ignore[arg-type]
    free.look()
    assert free() == 1000
    for missing in (300, 2000, 0):
        ring.write(Fact.ITERATION_STARTED, number=1, amount=missing)
        reads.step(0)
        assert free() == max(0, 1000 - missing)


def test_what_the_author_of_a_schedule_promised_is_passed_on():
    ring, listener = Ring(), Listener()
    reads = Relay(RingReader(ring.fd), listener, FreeMemory(lambda: 1))  # type: ignore[arg-type]
    for promised in (-1, 0, 5):
        ring.write(Fact.BUBBLE_OPENED, amount=promised, text="fill")
        reads.step(0)
    assert listener.promised == [None, 0, 5]


def test_a_driver_that_fails_leaves_nothing_free_and_is_said_once(caplog):
    answers = iter([500])

    def ask() -> int:
        try:
            return next(answers)
        except StopIteration:
            raise DeviceError("GPU is lost") from None

    free = FreeMemory(ask)
    free.look()
    assert free() == 500
    with caplog.at_level(logging.WARNING):
        free.look()
        free.look()
    assert free() == 0
    assert [record.getMessage() for record in caplog.records] == [
        "how much memory is free cannot be said, so nothing is filled: GPU is lost"
    ]


def test_the_relay_asks_nvml_about_its_rank_s_gpu(monkeypatch):
    library = Library()
    library.free_bytes = 7 * GIB
    monkeypatch.setattr(relay, "shared_nvml", lambda: Nvml(library))
    free = FreeMemory(relay._driver("GPU-bbbb-2"))
    free.look()
    assert free() == 7 * GIB
    library.free_bytes = 5 * GIB
    free.look()
    assert free() == 5 * GIB
    gone = FreeMemory(relay._driver("GPU-cccc-3"))
    gone.look()
    assert gone() == 0
    assert relay._driver(None)() == 0

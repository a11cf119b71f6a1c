"""The tests of ``tests/gpu`` as far as they go without a GPU: nothing else ever runs them on most machines."""

from __future__ import annotations

import pytest

from megatron.fill.types import CycleKey
from tests.gpu import test_bubbles
from tests.support.fake_stream import HostStream


def test_the_bubbles_rig_relays_a_bubble(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_bubbles, "cuda_signals", lambda device, ring: HostStream(ring.semaphore))
    timed = test_bubbles.Timed()
    timed.bus.begin_iteration(1)
    timed.bus.begin_schedule(CycleKey("1f1b", 1))
    timed.bus.open()
    timed.bus.close()
    timed.bus.end_iteration()
    timed.end()
    assert len(timed.recorder.bubbles) == 1

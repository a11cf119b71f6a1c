"""A forward and a backward in one call (``--overlap-moe-expert-parallel-comm``) are counted as each of them."""

from __future__ import annotations

from functools import partial

from megatron.fill.hooks import BubbleBus
from megatron.fill.types import CycleKey
from pipefill_patches import schedules


def test_the_drain_begins_after_the_last_backward(monkeypatch):
    bus = BubbleBus()
    monkeypatch.setattr(schedules, "bus", bus)
    combined = partial(schedules._combined, lambda config, **_virtual: config)
    bus.begin_iteration(1)
    bus.begin_schedule(CycleKey("interleaved", 2, 1, False))
    drains = []
    for forward, backward in ((0, None), (1, 0), (None, 1)):
        drains.append(bus.in_drain)
        ids = {"f_virtual_microbatch_id": forward, "b_virtual_microbatch_id": backward}
        assert combined("config", **ids) == "config"
    assert drains == [False, False, False]
    assert bus.in_drain

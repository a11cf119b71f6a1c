"""Devices and their free seats."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush

from megatron.fill.wings.sim.cluster.progress import SimulatedAttempt
from megatron.fill.wings.sim.cluster.rates import Offer, Rates


@dataclass(slots=True, eq=False)
class FleetDevice:
    """A device of a main job."""

    index: int  # device number, in the order of the main jobs and their groups
    name: str
    group: int  # number of the device's group
    rates: Rates
    up: bool = False  # True while its main job runs
    resident: SimulatedAttempt | None = None
    tail: SimulatedAttempt | None = None


class Seats:
    """Free seats of one kind (resident or tail), by device, each with its offer.

    If several devices could take a job, the one with the lowest number asks first.  Each offer has a heap of its seats,
    so that one device is asked among those that are alike; seats in it that are no longer free are removed when they
    reach its top.
    """

    def __init__(self, devices: int) -> None:
        self.offers: list[Offer | None] = [None] * devices
        self._heaps: dict[Offer, list[int]] = {}
        self._by_kind: dict[str, dict[Offer, None]] = {}  # the offers with a heap

    def free(self, device: int, offer: Offer) -> None:
        """Mark a device's seat as free, with this offer."""
        if self.offers[device] is offer:
            return
        self.offers[device] = offer
        heap = self._heaps.get(offer)
        if heap is None:
            heap = self._heaps[offer] = []
            for kind in offer.fits:
                self._by_kind.setdefault(kind, {})[offer] = None
        heappush(heap, device)

    def close(self, device: int) -> None:
        """Mark a device's seat as taken or unavailable."""
        self.offers[device] = None

    def lowest(self, kinds: Iterable[str]) -> int | None:
        """Return the lowest device with a free seat that fits at least one of these job kinds, or None."""
        offers = {offer: None for kind in kinds for offer in self._by_kind.get(kind, ())}
        heads = [head for offer in offers if (head := self._head(offer)) is not None]
        return min(heads, default=None)

    def _head(self, offer: Offer) -> int | None:
        heap = self._heaps[offer]
        while heap and self.offers[heap[0]] is not offer:
            heappop(heap)
        if heap:
            return heap[0]
        del self._heaps[offer]
        for kind in offer.fits:
            del self._by_kind[kind][offer]
        return None

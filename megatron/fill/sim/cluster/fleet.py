"""Devices and their free seats."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from heapq import heappop, heappush

from megatron.fill.sim.cluster.progress import SimulatedAttempt
from megatron.fill.sim.cluster.rates import Offer, Rates


class FleetDevice:
    """One device of a main job.

    Attributes:
        index: devices are numbered in the order of the main jobs and their groups.
        group: the number of its group.
        up: its main job runs.
    """

    __slots__ = ("group", "index", "main", "name", "rates", "resident", "tail", "up")

    def __init__(self, index: int, name: str, main: int, group: int, rates: Rates) -> None:
        self.index = index
        self.name = name
        self.main = main
        self.group = group
        self.rates = rates
        self.up = False
        self.resident: SimulatedAttempt | None = None
        self.tail: SimulatedAttempt | None = None


class Seats(ABC):
    """Free seats of one sort, by device, each with what it has to offer.

    Of several devices that could take a job, the lowest asks first.
    """

    def __init__(self, devices: int) -> None:
        self.offers: list[Offer | None] = [None] * devices

    def free(self, device: int, offer: Offer) -> None:
        """The seat of this device is free, and that is what it offers from now on."""
        self.offers[device] = offer

    def close(self, device: int) -> None:
        """The seat is taken, or cannot be."""
        self.offers[device] = None

    @abstractmethod
    def lowest(self, kinds: Iterable[str]) -> int | None:
        """The lowest device whose seat is free and fits at least one of these kinds of jobs; None if there is none."""


class ScannedSeats(Seats):
    """Looks at one seat after the other."""

    def lowest(self, kinds: Iterable[str]) -> int | None:
        wanted = set(kinds)
        found = (index for index, offer in enumerate(self.offers) if offer is not None and wanted & offer.fits.keys())
        return next(found, None)


class SortedSeats(Seats):
    """Keeps the free seats of each offer in a heap, so it asks one device of those that are alike.

    A heap may hold numbers of seats that are not free any more; they go when they come to its top.
    """

    def __init__(self, devices: int) -> None:
        super().__init__(devices)
        self._heaps: dict[Offer, list[int]] = {}
        self._by_kind: dict[str, dict[Offer, None]] = {}  # the offers with a heap

    def free(self, device: int, offer: Offer) -> None:
        if self.offers[device] is offer:
            return
        super().free(device, offer)
        heap = self._heaps.get(offer)
        if heap is None:
            heap = self._heaps[offer] = []
            for kind in offer.fits:
                self._by_kind.setdefault(kind, {})[offer] = None
        heappush(heap, device)

    def lowest(self, kinds: Iterable[str]) -> int | None:
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

"""Times measured between ranks, and the network that follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

from megatron.fill.errors import NetworkError
from megatron.fill.linux.files import write_text
from megatron.fill.wings.configure.network import Network, Place


@dataclass(frozen=True, slots=True)
class Transfer:
    """A message of ``size_bytes`` and its answer, a message of the smallest size."""

    sender: int
    receiver: int
    size_bytes: int
    seconds: tuple[float, ...]  # duration each time, from the begin of the message to the end of the answer


@dataclass(frozen=True, slots=True)
class Reduction:
    """An all-reduce."""

    ranks: tuple[int, ...]  # ranks of its group
    size_bytes: int
    seconds: tuple[float, ...]  # duration each time, on the slowest rank

    @property
    def bus_bytes_per_s(self) -> float:
        """Bandwidth of each rank's link in a ring: 2 (n - 1) / n of the data."""
        return 2 * (len(self.ranks) - 1) / len(self.ranks) * self.size_bytes / median(self.seconds)


@dataclass(frozen=True, slots=True)
class Measured:
    """Everything that was timed."""

    ranks: tuple[Place, ...]
    transfers: tuple[Transfer, ...]
    reductions: tuple[Reduction, ...]
    backend: str
    measured_at: str


def spread(seconds: Sequence[float]) -> float:
    """The interquartile range, relative to the median; 0 of one value."""
    if len(seconds) < 2:
        return 0.0
    first, middle, third = quantiles(seconds, n=4, method="inclusive")
    return (third - first) / middle


def network_of(measured: Measured) -> Network:
    """The straight line through the smallest and the largest size of each pair, by the medians.

    The latency is half of the smallest message's round trip: without a common clock the two ways cannot be told apart.
    The bandwidth is what the additional bytes of the largest size took, so the two ways of a link may differ in it.

    Raises:
        NetworkError: a pair lacks a size, or its large messages were not slower than its small ones.
    """
    count = len(measured.ranks)
    by_pair: dict[tuple[int, int], list[Transfer]] = {}
    for transfer in sorted(measured.transfers, key=lambda one: one.size_bytes):
        by_pair.setdefault((transfer.sender, transfer.receiver), []).append(transfer)
    bandwidth: list[list[float | None]] = [[None] * count for _ in range(count)]
    latency = [[0.0] * count for _ in range(count)]
    spreads = [[0.0] * count for _ in range(count)]
    for sender in range(count):
        for receiver in range(count):
            if sender == receiver:
                continue
            pair = by_pair.get((sender, receiver), [])
            names = f"{measured.ranks[sender]} to {measured.ranks[receiver]}"
            if len(pair) < 2:
                raise NetworkError(f"{names} was measured with {len(pair)} sizes of messages; expected two or more")
            small, large = pair[0], pair[-1]
            more_s = median(large.seconds) - median(small.seconds)
            if more_s <= 0:
                raise NetworkError(
                    f"{names}: {large.size_bytes} bytes were not slower than {small.size_bytes}; expected larger sizes"
                )
            bandwidth[sender][receiver] = (large.size_bytes - small.size_bytes) / more_s
            latency[sender][receiver] = median(small.seconds) / 2
            spreads[sender][receiver] = spread(large.seconds)
    return Network(
        ranks=measured.ranks,
        bandwidth_bytes_per_s=tuple(map(tuple, bandwidth)),
        latency_s=tuple(map(tuple, latency)),
        spread=tuple(map(tuple, spreads)),
        backend=measured.backend,
        measured_at=measured.measured_at,
    )


def write_csv(path: Path, measured: Measured) -> None:
    """Write a line for each size of each pair and of each group, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    places = measured.ranks
    least_s: dict[tuple[int, int], float] = {}
    for one in measured.transfers:
        pair, seconds = (one.sender, one.receiver), median(one.seconds)
        least_s[pair] = min(seconds, least_s.get(pair, seconds))
    lines = ["what,from,to,bytes,times,median_s,spread,bytes_per_s"]
    for one in measured.transfers:
        seconds = median(one.seconds) - least_s[one.sender, one.receiver] / 2  # without the answer
        ends = f"{places[one.sender]},{places[one.receiver]}"
        lines.append(_line("p2p", ends, one.size_bytes, one.seconds, seconds, one.size_bytes / seconds))
    for group in measured.reductions:
        ends = f"{places[group.ranks[0]]},{' '.join(str(places[rank]) for rank in group.ranks[1:])}"
        seconds = median(group.seconds)
        lines.append(_line("all-reduce", ends, group.size_bytes, group.seconds, seconds, group.bus_bytes_per_s))
    write_text(path, "\n".join(lines) + "\n")


def _line(what: str, ends: str, size_bytes: int, times: Sequence[float], seconds: float, rate: float) -> str:
    return f"{what},{ends},{size_bytes},{len(times)},{seconds:.9g},{spread(times):.6g},{rate:.9g}"

"""Time that ranks take to exchange data over their actual links.

A rank's place in the measured matrix is *physical*; Megatron's number for it is *logical*.  Here all are physical.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron.fill.wings.configure.network import Network
from megatron.fill.wings.mainjob.hardware import Network as NodeNetwork

type Edge = tuple[int, int]


class Route(tuple[tuple[float, float], ...]):
    """Links that are used at once, each as bytes per second and seconds of latency; equal ones once."""

    __slots__ = ()

    def time_s(self, size_bytes: float, messages: int = 1) -> float:
        """Until the last of them is through with so many bytes, in so many messages; 0 without links."""
        longest_s = 0.0
        for speed, latency_s in self:
            longest_s = max(longest_s, messages * latency_s + size_bytes / speed)
        return longest_s


@dataclass(frozen=True, slots=True)
class Links:
    """Links of all pairs of ranks."""

    # N x N, from row to column, while nothing else is sent; the diagonal does not count
    bytes_per_s: Sequence[Sequence[float]]
    latency_s: Sequence[Sequence[float]]  # N x N
    nodes: tuple[int, ...]  # per rank, the number of its node
    # per node, number of its ranks that may send to other nodes at full speed at once; more of them share.  Not a whole
    # number where a node's way out is faster than a rank, but not by a multiple.
    nics: float = 1
    # number of ranks after which a group of adjacent ranks has the same links again; 0 if there is none
    period: int = 0
    # a transfer between stages holds both its ends in all schedules, one way after the other, as gloo's does; else as
    # ``overlap.exchanges_hold`` has it
    rendezvous: bool = False

    @classmethod
    def measured(cls, network: Network, nics: int = 1) -> Links:
        """As ``pipefill network`` found them."""
        number: dict[str, int] = {}
        nodes = tuple(number.setdefault(place.host, len(number)) for place in network.ranks)
        speeds = [[0.0 if its is None else float(its) for its in row] for row in network.bandwidth_bytes_per_s]
        return cls(speeds, network.latency_s, nodes, nics, rendezvous=network.backend == "gloo")

    @classmethod
    def uniform(cls, network: NodeNetwork, nodes: int) -> Links:
        """As the data sheet has them: the ranks of a node share its one way out, none faster than inside the node."""
        its = network.gpus_per_node
        inside, outside = network.intra_node_bytes_s, min(network.intra_node_bytes_s, network.inter_node_bytes_s)
        rows = []
        for node in range(nodes):
            row = [outside] * (nodes * its)
            row[node * its : (node + 1) * its] = [inside] * its
            rows += [row] * its
        latency = [network.latency_s] * (nodes * its)
        places = tuple(rank // its for rank in range(nodes * its))
        return cls(rows, [latency] * (nodes * its), places, network.inter_node_bytes_s / outside, its)

    def first(self, ranks: int) -> Links:
        """Those of the first ranks only."""
        cut = [row[:ranks] for row in self.bytes_per_s[:ranks]]
        latency = [row[:ranks] for row in self.latency_s[:ranks]]
        return Links(cut, latency, self.nodes[:ranks], self.nics, self.period, self.rendezvous)

    def routes(self, parts: Sequence[Sequence[Edge]]) -> list[Route]:
        """Return a route for each part of transfers that all begin at once."""
        nodes, speeds, latency = self.nodes, self.bytes_per_s, self.latency_s
        out: Counter[int] = Counter()
        into: Counter[int] = Counter()
        for part in parts:
            for sender, receiver in part:
                if nodes[sender] != nodes[receiver]:
                    out[nodes[sender]] += 1
                    into[nodes[receiver]] += 1
        routes = []
        for part in parts:
            found = set()
            for sender, receiver in part:
                speed = speeds[sender][receiver]
                if nodes[sender] != nodes[receiver]:
                    speed /= max(1.0, max(out[nodes[sender]], into[nodes[receiver]]) / self.nics)
                found.add((speed, latency[sender][receiver]))
            routes.append(Route(sorted(found)))
        return routes

    def route(self, edges: Iterable[Edge]) -> Route:
        """Return the route of transfers that all begin at once."""
        return self.routes([list(edges)])[0]

    def ring(self, groups: Iterable[Sequence[int]]) -> Route:
        """From each rank to the next of its group, and from the last to the first; none in groups of one."""
        return self.route((group[at - 1], group[at]) for group in groups if len(group) > 1 for at in range(len(group)))


def all_reduce_s(route: Route, ranks: int, size_bytes: float) -> float:
    """Rings of so many ranks: ``2 (n-1) / n`` of the data over each link, in ``2 (n-1)`` messages."""
    steps = 2 * (ranks - 1)
    return route.time_s(size_bytes * steps / ranks, steps) if size_bytes else 0.0

"""The iteration's bound for many orders of ranks at once: ``latency.bound_ns`` of each, in arrays.

What follows is that function and those it calls (``latency.iteration``, ``layout.lay_out``, ``Links.routes``), in the
same order of operations, so that the numbers are the same to the nanosecond; a test compares them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.fill.wings.configure.latency import fixed_step_s, stage_times, step_sizes
from megatron.fill.wings.configure.links import Links
from megatron.fill.wings.configure.overlap import HELD, tensor_exchange_s, transfers_hold
from megatron.fill.wings.configure.passes import Passes
from megatron.fill.wings.mainjob.analytic import p2p_bytes, tied_embedding_bytes
from megatron.fill.wings.mainjob.hardware import GpuKind
from megatron.fill.wings.mainjob.kernels import Overlaps
from megatron.fill.wings.mainjob.model import ModelSpec
from megatron.fill.wings.mainjob.parallel import Parallel

type Floats = NDArray[np.float64]
type Ints = NDArray[np.int64]


class ManyOrders:
    """Energies of many orders of one configuration, whose tensor-parallel groups are each inside a node in every order.

    Arrays are K orders x pp stages x dp replicas x tp ranks, or a part of that.
    """

    def __init__(
        self, model: ModelSpec, gpu: GpuKind, efficiency: float, its: Parallel, links: Links, passes: Passes | None
    ) -> None:
        self._its, self._nics = its, links.nics
        self._speed = np.array(links.bytes_per_s, np.float64)
        self._latency = np.array(links.latency_s, np.float64)
        self._node = np.array(links.nodes, np.int64)
        self._shares = max(map(links.nodes.count, set(links.nodes))) > links.nics  # as no rank sends two at once
        self._p2p_bytes = p2p_bytes(model, its)
        self._tied_bytes = tied_embedding_bytes(model, its)
        self._sizes = step_sizes(model, gpu, its, passes)
        self._fixed_s = fixed_step_s(its, passes)
        self._held = transfers_hold(its, passes is not None)
        units = range(its.gpus // its.tp)
        rings = [links.ring([range(unit * its.tp, (unit + 1) * its.tp)]) for unit in units]
        reduces = [tensor_exchange_s(model, its, ring) for ring in rings]
        if passes is not None or its.tp == 1:
            reduces = [0.0] * len(units)
        self._tensor = np.array(reduces)
        # by virtual stage, and by the unit that is slowest in it
        known: dict[float, list[Any]] = {}
        for reduce_s in reduces:
            if reduce_s not in known:
                known[reduce_s] = stage_times(model, gpu, efficiency, its, [(reduce_s, reduce_s)] * its.pp, passes)
        self._forward = np.array([[one.forward_ns for one in known[its_s]] for its_s in reduces], np.int64).T
        self._backward = np.array([[one.backward_ns for one in known[its_s]] for its_s in reduces], np.int64).T

    @staticmethod
    def fits(model: ModelSpec, its: Parallel, links: Links) -> bool:
        """True if it can be applied to a layout; exchanges that overlap are weighed one by one."""
        groups = range(0, its.gpus, its.tp)
        inside = all(len(set(links.nodes[at : at + its.tp])) == 1 for at in groups)
        alone = its.cp == 1 and not its.has_expert_groups and model.kernels.overlaps == Overlaps()
        return alone and its.pp > 1 and inside

    def __call__(self, orders: Ints) -> tuple[Ints, Floats]:
        """K orders, K x ranks, whose tensor-parallel groups are in their own order.

        Returns:
            the bound of each, and the mean of all paths that it is the longest of.
        """
        its = self._its
        ranks = orders.reshape(-1, its.pp, its.dp, its.tp)
        forward, passes = self._stages(ranks)
        reduce, step = self._reduce_and_step(ranks)
        onward = np.roll(ranks, -1, axis=1)
        there, back = self._transfers_ns(ranks, onward), self._transfers_ns(onward, ranks)
        if self._held:
            held = self._held_ns(there.max(axis=2))
            forward, passes = forward + held[:, : its.pp], passes + 2 * held
        work = its.microbatches * passes.reshape(len(ranks), its.chunks, its.pp).sum(axis=1)
        backward = passes[:, : its.pp] - forward
        # along the pipeline, for each replica: K x dp x pp
        way_there = _before(forward[:, None, :] + there.transpose(0, 2, 1))
        way_back = _before(backward[:, None, :] + back.transpose(0, 2, 1))
        begun = np.maximum(step[:, None, :1] + way_there, step[:, None, :])
        ends = begun + work[:, None, :] + np.maximum(reduce[:, None, :], way_back + reduce[:, None, :1])
        longest, mean = ends.max(axis=(1, 2)), ends.mean(axis=(1, 2))
        if its.schedule == "1f1b" and its.chunks == 1:
            trip = passes.sum(axis=1)[:, None] + (there + back)[:, :-1].sum(axis=1)
            trips, rest = divmod(its.microbatches - 1, its.pp)
            path = (trips + 1) * trip.max(axis=1) + rest * forward[:, 0]
            longest = np.maximum(longest, step[:, 0] + path + reduce[:, 0])
            mean = (mean + (trips + 1) * trip.mean(axis=1) + rest * forward[:, 0] + reduce.mean(axis=1)) / 2
        return longest, mean

    def _stages(self, ranks: Ints) -> tuple[Ints, Ints]:
        """Forward passes of the first chunks, K x pp; both passes of all virtual stages, K x (chunks x pp)."""
        units = ranks[..., 0] // self._its.tp
        slowest = np.take_along_axis(units, self._tensor[units].argmax(axis=2, keepdims=True), 2)[..., 0]
        slowest = np.tile(slowest, self._its.chunks)
        virtual = np.arange(slowest.shape[1])
        forward = self._forward[virtual, slowest]
        return forward[:, : self._its.pp], forward + self._backward[virtual, slowest]

    def _held_ns(self, there: Ints) -> Ints:
        """Return ns that transfers take of a pass beside them, by virtual stage; ``there`` is K x pp, one way."""
        behind = np.tile(there, self._its.chunks)
        before = np.roll(behind, 1, axis=1)
        before[:, 0] = behind[:, -1] = 0
        return np.rint(HELD * (before + behind)).astype(np.int64)

    def _reduce_and_step(self, ranks: Ints) -> tuple[Ints, Ints]:
        """K x pp each."""
        its, count = self._its, len(ranks)
        shape = (count, its.pp)
        reduce_s, step_s = np.zeros(shape), np.zeros(shape)
        ring = self._route(np.roll(ranks, 1, axis=2), ranks, its.pp) if its.dp > 1 else None
        messages = 2 * (its.dp - 1)
        for stage, (gradients, weights, own_s) in enumerate(self._sizes):
            step_s[:, stage] = own_s
            if ring is None:
                continue
            latency, speed = (part[:, stage] for part in ring)

            def all_reduce(size: float, latency: Floats = latency, speed: Floats = speed) -> Floats:
                return (messages * latency + size * messages / its.dp / speed).max(axis=(1, 2))

            if its.distributed_optimizer:
                reduce_s[:, stage] = all_reduce(gradients) / 2
                step_s[:, stage] = own_s / its.dp + all_reduce(weights) / 2
            else:
                reduce_s[:, stage] = all_reduce(gradients)
        if self._tied_bytes:
            ends = np.stack([ranks[:, 0], ranks[:, -1]], axis=1)[:, None]
            latency, speed = self._route(ends[:, :, ::-1], ends, 1)
            tied_s = (2 * latency + self._tied_bytes * 2 / 2 / speed).max(axis=(1, 2, 3, 4))
            reduce_s[:, [0, -1]] += tied_s[:, None]
        return _ns(reduce_s), _ns(self._fixed_s + step_s)

    def _transfers_ns(self, senders: Ints, receivers: Ints) -> Ints:
        """From each stage to the next, or back: K x pp x dp."""
        latency, speed = self._route(senders, receivers, self._its.pp)
        return _ns((latency + self._p2p_bytes / speed).max(axis=3))

    def _route(self, senders: Ints, receivers: Ints, parts: int) -> tuple[Floats, Floats]:
        """Latency and speed of each transfer; those of one of the ``parts`` along the second axis begin at once."""
        pairs = senders * len(self._speed) + receivers
        latency, speed = self._latency.take(pairs), self._speed.take(pairs)
        if not self._shares:
            return latency, speed
        source, target = self._node[senders], self._node[receivers]
        crosses = source != target
        nodes = int(self._node.max()) + 1
        group = np.arange(len(senders) * parts).reshape(len(senders), parts, *(1,) * (senders.ndim - 2)) * nodes
        most = np.zeros(senders.shape, np.int64)
        for ends in (source, target):
            keys = group + ends
            counts = np.bincount(keys[crosses], minlength=len(senders) * parts * nodes)
            most = np.maximum(most, counts[keys])
        return latency, np.where(crosses, speed / np.maximum(1.0, most / self._nics), speed)


def _before(steps: Ints) -> Ints:
    """Sum of the elements before each place of the last axis."""
    found = np.cumsum(steps, axis=-1)
    return np.concatenate([np.zeros_like(found[..., :1]), found[..., :-1]], axis=-1)


def _ns(seconds: Floats) -> Ints:
    return np.rint(seconds * 1e9).astype(np.int64)

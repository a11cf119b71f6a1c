"""Energy of an order of ranks: a lower bound on the iteration, by the links that it puts the groups of ranks on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron.fill.wings.configure.latency import bound_ns, iteration
from megatron.fill.wings.configure.layout import Known, lay_out
from megatron.fill.wings.configure.links import Links
from megatron.fill.wings.configure.many import ManyOrders
from megatron.fill.wings.configure.passes import Passes
from megatron.fill.wings.mainjob.hardware import GpuKind
from megatron.fill.wings.mainjob.model import ModelSpec
from megatron.fill.wings.mainjob.parallel import Parallel

_KEPT = 20_000  # routes that are kept; a few hundred bytes each


class Energy:
    """Lower bound on a configuration's iteration in ns, by the order of its ranks."""

    def __init__(
        self,
        model: ModelSpec,
        gpu: GpuKind,
        efficiency: float,
        its: Parallel,
        links: Links,
        passes: Passes | None = None,
    ) -> None:
        self._model, self._gpu, self._efficiency, self._its, self._links = model, gpu, efficiency, its, links
        self._passes = passes
        self._many: ManyOrders | None = None
        self._known = Known()

    def __call__(self, order: Sequence[int]) -> int:
        if len(self._known.stages) + len(self._known.boundaries) >= _KEPT:
            self._known = Known()
        layout = lay_out(self._links, self._its, order, self._known)
        return bound_ns(iteration(self._model, self._gpu, self._efficiency, self._its, layout, self._passes))

    def least(self) -> int:
        """Lower bound in ns for any order: each link of the layout is the best available."""
        ranks = range(self._its.gpus)
        links = self._links
        if len(ranks) == 1:
            return self(ranks)
        speed = max(links.bytes_per_s[one][other] for one in ranks for other in ranks if one != other)
        latency = min(links.latency_s[one][other] for one in ranks for other in ranks if one != other)
        best = Links([[speed] * len(ranks)] * len(ranks), [[latency] * len(ranks)] * len(ranks), (0,) * len(ranks))
        return Energy(self._model, self._gpu, self._efficiency, self._its, best, self._passes)(ranks)

    def many(self, orders: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the energies of K orders (K x ranks) at once, much faster where the layout allows it.

        Returns:
            the energies, and a mean over all paths of which the energy is the longest.  Of two orders with one energy,
            that with the lower mean is nearer to a better one.
        """
        if self._many is None and ManyOrders.fits(self._model, self._its, self._links):
            self._many = ManyOrders(self._model, self._gpu, self._efficiency, self._its, self._links, self._passes)
        if self._many is not None:
            return self._many(orders)
        found = np.array([self(order) for order in orders.tolist()], np.int64)
        return found, found.astype(np.float64)

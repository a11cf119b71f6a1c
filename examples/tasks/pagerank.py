"""PageRank as a side task (FreeRide, section 6), on the task's device."""

from __future__ import annotations

import os
import warnings
from typing import IO, Any, ClassVar

import numpy as np

from megatron.fill.sidetask.base import SideTask
from megatron.fill.sidetask.checks import check_number, check_whole

from .edges import Graph, check_same_graph, load_graph

_TOP = 10  # number of nodes that PageRank reports
_ROWS = 1000  # lines of pagerank.csv written per step: about 1 ms
_CALL_EDGES = 20_000  # overhead of a torch call, in edges: keeps the steps short on tiny graphs
_CHUNK_EDGES = {"cpu": 400_000, "cuda": 20_000_000}  # edges per step: about 1 ms on a core; on a GPU not measured


class PageRank(SideTask):
    """The PageRank of every node, by power iteration.

    Parallel edges count once, as in ``networkx.DiGraph``; a node without out-edges spreads its rank over all nodes.
    An iteration gathers along the edges (a sparse matrix times the ranks), then updates the nodes.  A step continues
    where the last one ended, for ``chunk_edges`` edges and nodes; only edges count as work.  At the end,
    ``pagerank.csv`` in the job's folder holds ``node,rank`` lines in the order of the nodes' ids, and the task reports
    ``iterations``, ``converged``, and ``top``: the ten highest ranks as ``[node, rank]``.

    The device holds 12 bytes per edge, 21 bytes per node, and a step's temporary memory.
    """

    unit: ClassVar[str] = "edges"
    _file: IO[str] | None = None  # pagerank.csv, while it is being written

    def create(
        self,
        edges: int | str = 200_000,
        nodes: int = 20_000,
        seed: int = 0,
        chunk_edges: int | None = None,
        damping: float = 0.85,
        tolerance: float = 1e-9,
        max_iterations: int = 500,
        repeat: int = 1,
    ) -> None:
        """Read or generate the graph.

        Args:
            edges: number of edges to generate, or a file to read them from (``read_graph``); a relative path is
                relative to the job's folder.
            nodes: number of nodes of a generated graph.
            seed: seed of a generated graph.
            chunk_edges: edges and nodes per step; None for 400,000 on a CPU and 20 million on a GPU.
            damping: probability of following an edge, 0 to below 1.
            tolerance: total change of the ranks, whose sum is 1, at which the computation stops.
            max_iterations: number of iterations after which it stops in any case.
            repeat: number of computations; 0 to continue until the training ends.  The result, which is the same each
                time, is written after the first.

        Raises:
            ValueError: an argument is out of range, or the file has a line that is not an edge.
        """
        import torch

        chunk_edges = _CHUNK_EDGES[self.context.device.partition(":")[0]] if chunk_edges is None else chunk_edges
        check_whole(chunk_edges=(chunk_edges, 1), max_iterations=(max_iterations, 1), repeat=(repeat, 0))
        check_number("damping", damping, below=1)
        check_number("tolerance", tolerance)
        graph = load_graph(edges, nodes, seed)
        self._ids, self._count = graph.ids, len(graph.ids)
        keys = np.unique(graph.targets * self._count + graph.sources)  # by target: the rows of a matrix
        sources, targets = keys % self._count, keys // self._count
        self._checksum, self._edges = Graph(graph.ids, sources, targets).checksum, len(keys)
        degrees = np.bincount(sources, minlength=self._count)
        weights = 1 / np.maximum(degrees, 1)  # part of its rank that a node passes along each of its edges
        self._rows = np.searchsorted(targets, np.arange(self._count + 1))  # where each target's edges begin
        index = np.int32 if max(self._edges, self._count) < 2**31 else np.int64
        self._columns = torch.from_numpy(sources.astype(index))
        self._values = torch.from_numpy(weights[sources])
        self._starts = torch.from_numpy(self._rows.astype(index))
        self._dangling = torch.from_numpy(degrees == 0)
        self._chunk, self._damping, self._tolerance = chunk_edges, damping, tolerance
        self._max_iterations, self._repeat = max_iterations, repeat
        self.ranks = torch.zeros(self._count, dtype=torch.float64)
        self._sums = torch.zeros_like(self.ranks)  # rank that each node has received in this iteration
        self._totals = torch.zeros(2, dtype=torch.float64)  # this iteration's total change and total dangling rank
        self._top: list[tuple[int, float]] = []
        self._done = 0  # computations finished
        self._restart()

    def init(self) -> None:
        """Move to the device, and multiply once there, since the first use of its library is slow."""
        device = self.context.device
        self._columns, self._values = self._columns.to(device), self._values.to(device)
        self._starts, self._dangling = self._starts.to(device), self._dangling.to(device)
        self.ranks, self._sums = self.ranks.to(device), self._sums.to(device)
        self._totals = self._totals.to(device)
        self._received(0, min(self._chunk, self._edges))

    def _restart(self) -> None:
        # A first update of the nodes, with nothing received and a base of 1/n, sets every rank to 1/n.
        self._iteration, self._position = -1, self._edges
        self._base = 1 / self._count
        self._totals.zero_()

    def run_next_step(self) -> float:
        edges, nodes = self._edges, self._count
        if self._finished():
            raise StopIteration
        if self._position >= edges + nodes:
            self._write(self._position - edges - nodes)
            return 0.0
        work, left = 0.0, self._chunk
        while left > 0 and self._position < edges + nodes and not self._finished():
            begin = self._position
            if begin < edges:
                self._gather(begin, min(begin + left, edges))
                work += self._position - begin
                left -= max(self._position - begin, _CALL_EDGES)
            else:
                size = min(left, edges + nodes - begin)
                self._update(begin - edges, begin - edges + size)
                left -= max(size, _CALL_EDGES)
        return work

    def _finished(self) -> bool:
        return 0 < self._repeat <= self._done

    def stop(self) -> None:
        if self._file is not None:
            self._file.close()

    def state_dict(self) -> dict[str, Any]:
        """The state to resume from; a file that is being written is started again."""
        return {
            "graph": self._checksum,
            "ranks": self.ranks.cpu(),
            "sums": self._sums.cpu(),
            "scalars": [self._base, *self._totals.tolist(), self.context.total_work],
            "position": min(self._position, self._edges + self._count),
            "iteration": self._iteration,
            "done": self._done,
            "result": dict(self.context.result),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state.

        Raises:
            ValueError: the state is that of another graph.
        """
        check_same_graph(self._checksum, state)
        self.ranks, self._sums = state["ranks"], state["sums"]
        self._base, *totals, self.context.total_work = state["scalars"]
        self._totals = self.ranks.new_tensor(totals)
        self._position, self._iteration, self._done = state["position"], state["iteration"], state["done"]
        self.context.report(**state["result"])

    def _gather(self, begin: int, end: int) -> None:
        first, received = self._received(begin, end)
        self._sums[first : first + len(received)] += received
        self._position = end

    def _received(self, begin: int, end: int) -> tuple[int, Any]:
        """The first target of the edges ``begin`` to ``end``, and the rank that each target from it on receives."""
        import torch

        first = int(np.searchsorted(self._rows, begin, "right")) - 1
        last = int(np.searchsorted(self._rows, end, "left"))
        starts = self._starts[first : last + 1].clamp(begin, end) - begin
        shape = (last - first, self._count)
        with warnings.catch_warnings(), torch.sparse.check_sparse_tensor_invariants(False):
            warnings.simplefilter("ignore")  # torch warns that sparse matrices are beta
            matrix = torch.sparse_csr_tensor(starts, self._columns[begin:end], self._values[begin:end], shape)
        return first, matrix @ self.ranks

    def _update(self, begin: int, end: int) -> None:
        import torch

        nodes = slice(begin, end)
        ranks = self._damping * self._sums[nodes] + self._base
        self._totals += torch.stack([(ranks - self.ranks[nodes]).abs().sum(), ranks[self._dangling[nodes]].sum()])
        self.ranks[nodes] = ranks
        self._sums[nodes] = 0.0
        self._position += end - begin
        if end == self._count:
            self._end_iteration()

    def _end_iteration(self) -> None:
        self._iteration += 1
        change, lost = self._totals.tolist()
        converged = self._iteration > 0 and change <= self._tolerance
        if not converged and self._iteration < self._max_iterations:
            self._base = (1 - self._damping + self._damping * lost) / self._count
            self._position = 0
            self._totals.zero_()
        elif self._done:
            self._end_computation()
        else:
            if self._repeat:
                self.context.total_work = float(self._repeat * self._iteration * self._edges)
            self.context.report(iterations=self._iteration, converged=converged)

    def _write(self, begin: int) -> None:
        end = min(begin + _ROWS, self._count)
        scratch = self.context.directory / "pagerank.csv.part"
        if begin == 0:
            self._file = scratch.open("w", encoding="utf-8")
            self._file.write("node,rank\n")
            self._top = []
        assert self._file is not None
        rows = list(zip(self._ids[begin:end].tolist(), self.ranks[begin:end].tolist(), strict=True))
        self._file.writelines(f"{node},{rank!r}\n" for node, rank in rows)
        self._top = sorted(self._top + rows, key=lambda row: -row[1])[:_TOP]
        self._position += end - begin
        if end == self._count:
            self._file.close()
            os.replace(scratch, self.context.directory / "pagerank.csv")
            self.context.report(top=[list(row) for row in self._top])
            self._end_computation()

    def _end_computation(self) -> None:
        self._done += 1
        if not self._repeat or self._done < self._repeat:
            self._restart()

"""The graph side tasks (FreeRide, section 6): PageRank, and matrix factorisation by SGD (its "Graph SGD")."""

from __future__ import annotations

import math
import os
from typing import IO, Any, ClassVar

import numpy as np

from megatron.fill.sidetask.base import SideTask
from megatron.fill.sidetask.checks import check_number, check_whole
from megatron.fill.sidetask.edges import Graph, load_graph

_TOP = 10  # nodes that PageRank reports
_ROWS = 1000  # lines of pagerank.csv written in a step: about 1 ms
_CALL_EDGES = 5000  # what a call of numpy costs, in edges: keeps the steps short on tiny graphs


class PageRank(SideTask):
    """The PageRank of every node, by power iteration.

    Parallel edges count once, as in ``networkx.DiGraph``; a node without out-edges spreads its rank over all nodes.
    An iteration gathers along the edges, then updates the nodes; a step goes on from where the last one ended, for
    as many edges and nodes as it is told, and only the edges count as work.  At the end, ``pagerank.csv`` in the job's
    folder holds ``node,rank`` lines in the order of the nodes' ids, and the task reports ``iterations``,
    ``converged``, and ``top``: the ten highest ranks as ``[node, rank]``.
    """

    unit: ClassVar[str] = "edges"
    _file: IO[str] | None = None  # pagerank.csv, while it is being written

    def create(
        self,
        edges: int | str = 200_000,
        nodes: int = 20_000,
        seed: int = 0,
        chunk_edges: int = 400_000,
        damping: float = 0.85,
        tolerance: float = 1e-9,
        max_iterations: int = 500,
        repeat: int = 1,
    ) -> None:
        """Read or generate the graph.

        Args:
            edges: how many edges to generate, or a file to read them from (``read_graph``); a relative path is
                relative to the job's folder.
            nodes, seed: of the generated graph.
            chunk_edges: edges and nodes a step.
            damping: the chance of following an edge, 0 to below 1.
            tolerance: stop when the ranks, whose sum is 1, change by no more than this in sum.
            max_iterations: stop then in any case.
            repeat: how often to compute it; 0 to go on until the main job ends.  The result, the same each time, is
                written after the first.

        Raises:
            ValueError: an argument is out of range, or the file has a line that is no edge.
        """
        check_whole(chunk_edges=(chunk_edges, 1), max_iterations=(max_iterations, 1), repeat=(repeat, 0))
        check_number("damping", damping, below=1)
        check_number("tolerance", tolerance)
        graph = load_graph(edges, nodes, seed)
        self._count = len(graph.ids)
        keys = np.unique(graph.targets * self._count + graph.sources)  # by target: a chunk adds to few nodes
        self._graph = graph = Graph(graph.ids, keys % self._count, keys // self._count)
        degrees = np.bincount(graph.sources, minlength=self._count)
        self._dangling = degrees == 0
        self._weights = np.where(self._dangling, 0.0, 1 / np.maximum(degrees, 1))
        self._chunk, self._damping, self._tolerance = chunk_edges, damping, tolerance
        self._max_iterations, self._repeat = max_iterations, repeat
        self.ranks = np.zeros(self._count)
        self._shares = np.zeros(self._count)  # what a node gives along each of its edges
        self._sums = np.zeros(self._count)  # what it has received in this iteration
        self._top: list[tuple[int, float]] = []
        self._done = 0  # computations finished
        self._restart()

    def _restart(self) -> None:
        # A first update of the nodes, with nothing received and a base of 1/n, sets every rank to 1/n.
        self._iteration, self._position = -1, len(self._graph.sources)
        self._base, self._change, self._lost = 1 / self._count, 0.0, 0.0

    def run_next_step(self) -> float:
        edges, nodes = len(self._graph.sources), self._count
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
        """A file that is being written is begun anew."""
        import torch

        return {
            "graph": self._graph.checksum,
            "ranks": torch.tensor(self.ranks),
            "sums": torch.tensor(self._sums),
            "scalars": [self._base, self._change, self._lost, self.context.total_work],
            "position": min(self._position, len(self._graph.sources) + self._count),
            "iteration": self._iteration,
            "done": self._done,
            "result": dict(self.context.result),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError if the state is that of another graph."""
        _check_same_graph(self._graph, state)
        self.ranks, self._sums = state["ranks"].numpy().copy(), state["sums"].numpy().copy()
        self._shares = self.ranks * self._weights
        self._base, self._change, self._lost, self.context.total_work = state["scalars"]
        self._position, self._iteration, self._done = state["position"], state["iteration"], state["done"]
        self.context.report(**state["result"])

    def _gather(self, begin: int, end: int) -> None:
        targets = self._graph.targets[begin:end]
        first = int(targets[0])
        received = np.bincount(targets - first, self._shares[self._graph.sources[begin:end]])
        self._sums[first : first + len(received)] += received
        self._position = end

    def _update(self, begin: int, end: int) -> None:
        nodes = slice(begin, end)
        ranks = self._damping * self._sums[nodes] + self._base
        self._change += float(np.abs(ranks - self.ranks[nodes]).sum())
        self._lost += float(ranks[self._dangling[nodes]].sum())
        self.ranks[nodes] = ranks
        self._shares[nodes] = ranks * self._weights[nodes]
        self._sums[nodes] = 0.0
        self._position += end - begin
        if end == self._count:
            self._end_iteration()

    def _end_iteration(self) -> None:
        self._iteration += 1
        converged = self._iteration > 0 and self._change <= self._tolerance
        if not converged and self._iteration < self._max_iterations:
            self._base = (1 - self._damping + self._damping * self._lost) / self._count
            self._position, self._change, self._lost = 0, 0.0, 0.0
        elif self._done:
            self._end_computation()
        else:
            if self._repeat:
                self.context.total_work = float(self._repeat * self._iteration * len(self._graph.sources))
            self.context.report(iterations=self._iteration, converged=converged)

    def _write(self, begin: int) -> None:
        end = min(begin + _ROWS, self._count)
        scratch = self.context.directory / "pagerank.csv.part"
        if begin == 0:
            self._file = scratch.open("w", encoding="utf-8")
            self._file.write("node,rank\n")
            self._top = []
        assert self._file is not None
        rows = list(zip(self._graph.ids[begin:end].tolist(), self.ranks[begin:end].tolist(), strict=True))
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


class MatrixFactorization(SideTask):
    """Factors the edges' values: ``value[u, v] ~ mean + rows[u] @ columns[v]``, by minibatch SGD.

    The values are the file's third column; without one they come from a hidden model of four factors and noise of
    0.1.  An edge's step is divided by 1 plus its factors' squared lengths (normalised LMS), and a node follows the mean
    of its edges in the batch, so that neither outliers nor hubs can make it diverge.  The edges are shuffled once.
    After each epoch the task reports ``epoch`` and ``rmse``: the root mean square error over the epoch's batches, each
    before its update.
    """

    unit: ClassVar[str] = "edges"

    def create(
        self,
        edges: int | str = 200_000,
        nodes: int = 20_000,
        seed: int = 0,
        factors: int = 16,
        batch_edges: int = 4096,
        epochs: int | None = 20,
        learning_rate: float = 0.5,
        regularization: float = 0.01,
    ) -> None:
        """Read or generate the graph and its values.

        Args:
            edges, nodes, seed: as for ``PageRank``; the seed is also that of the values and of the first factors.
            factors: length of a node's vectors.
            batch_edges: edges a step.
            epochs: passes over the edges; None or 0 to go on until the main job ends.
            learning_rate: what part of an edge's error one step corrects, 0 to below 1.
            regularization: the weight of the squared factors.

        Raises:
            ValueError: an argument is out of range, or the file has a line that is no edge.
        """
        epochs = 0 if epochs is None else epochs
        check_whole(factors=(factors, 1), batch_edges=(batch_edges, 1), epochs=(epochs, 0), seed=(seed, 0))
        check_number("learning_rate", learning_rate, below=1)
        check_number("regularization", regularization, below=1)
        self._graph = graph = load_graph(edges, nodes, seed)
        generator = np.random.default_rng(seed)
        values = graph.values if graph.values is not None else _hidden_values(graph, generator)
        self._scale = float(values.std()) or 1.0
        order = generator.permutation(len(values))
        self._sources, self._targets = graph.sources[order], graph.targets[order]
        self._values = ((values - values.mean()) / self._scale)[order].astype(np.float32)
        shape = (len(graph.ids), factors)
        self.rows, self.columns = (
            generator.normal(0, 0.5 / math.sqrt(factors), shape).astype(np.float32) for _ in range(2)
        )
        self._batch, self._epochs = batch_edges, epochs
        self._rate, self._regularization = np.float32(learning_rate), np.float32(regularization)
        self._epoch, self._position, self._squares = 0, 0, 0.0
        if epochs:
            self.context.total_work = float(epochs * len(values))

    def run_next_step(self) -> float:
        if self._epochs and self._epoch >= self._epochs:
            raise StopIteration
        batch = slice(self._position, self._position + self._batch)
        sources, targets, values = self._sources[batch], self._targets[batch], self._values[batch]
        rows, columns = self.rows[sources], self.columns[targets]
        errors = values - np.einsum("ij,ij->i", rows, columns)
        self._squares += float(errors @ errors)
        lengths = np.einsum("ij,ij->i", rows, rows) + np.einsum("ij,ij->i", columns, columns)
        gain = (self._rate * errors / (1 + lengths))[:, None]
        decay = self._rate * self._regularization
        _add_means(self.rows, sources, gain * columns - decay * rows)
        _add_means(self.columns, targets, gain * rows - decay * columns)
        self._position += len(values)
        if self._position == len(self._values):
            self._end_epoch()
        return float(len(values))

    def state_dict(self) -> dict[str, Any]:
        import torch

        return {
            "graph": self._graph.checksum,
            "rows": torch.tensor(self.rows),
            "columns": torch.tensor(self.columns),
            "epoch": self._epoch,
            "position": self._position,
            "squares": self._squares,
            "result": dict(self.context.result),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError if the state is that of another graph."""
        _check_same_graph(self._graph, state)
        self.rows, self.columns = state["rows"].numpy().copy(), state["columns"].numpy().copy()
        self._epoch, self._position, self._squares = state["epoch"], state["position"], state["squares"]
        self.context.report(**state["result"])

    def _end_epoch(self) -> None:
        self._epoch += 1
        rmse = self._scale * math.sqrt(self._squares / len(self._values))
        self.context.report(epoch=self._epoch, rmse=rmse)
        self._position, self._squares = 0, 0.0


def _hidden_values(graph: Graph, generator: np.random.Generator) -> np.ndarray:
    rows, columns = generator.normal(0, 1 / math.sqrt(2), (2, len(graph.ids), 4))
    exact = np.einsum("ij,ij->i", rows[graph.sources], columns[graph.targets])
    return exact + generator.normal(0, 0.1, len(exact))


def _add_means(table: np.ndarray, index: np.ndarray, changes: np.ndarray) -> None:
    """Add to each row of ``table`` the mean of the changes that are meant for it."""
    order = np.argsort(index, kind="stable")
    ordered = index[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=-1))
    counts = np.diff(starts, append=len(index))
    table[ordered[starts]] += np.add.reduceat(changes[order], starts) / counts[:, None].astype(table.dtype)


def _check_same_graph(graph: Graph, state: dict[str, Any]) -> None:
    if state["graph"] != graph.checksum:
        raise ValueError(f"the checkpoint is of another graph ({state['graph']:08x}); expected {graph.checksum:08x}")

"""Matrix factorization by SGD as a side task (FreeRide, section 6: "Graph SGD"), on the task's device."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from megatron.fill.sidetask.base import SideTask
from megatron.fill.sidetask.checks import check_number, check_whole

from .edges import Graph, check_same_graph, load_graph


class MatrixFactorization(SideTask):
    """Factorization of the edges' values by minibatch SGD: ``value[u, v] ~ mean + rows[u] @ columns[v]``.

    The values are the file's third column; without it, a hidden model of four factors and noise of 0.1 generates them.
    An edge's step is divided by 1 plus its factors' squared lengths (normalized LMS), and a node is updated by the mean
    over its edges in the batch, so that neither outliers nor hubs can make it diverge.  The edges are shuffled once.
    After each epoch the task reports ``epoch`` and ``rmse``: the root mean square error over the epoch's batches, each
    before its update.

    A step is one batch.  The default of 4096 edges is too small for a GPU, which needs about 100,000; the size changes
    the result.  The device holds 20 bytes per edge, and per node 8 bytes for each factor and 4 more.
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
            edges: as for ``PageRank``.
            nodes: as for ``PageRank``.
            seed: as for ``PageRank``; also the seed of the values and of the initial factors.
            factors: length of a node's vectors.
            batch_edges: edges per step.
            epochs: passes over the edges; None or 0 to continue until the training ends.
            learning_rate: part of an edge's error that one step corrects, 0 to below 1.
            regularization: weight of the squared factors.

        Raises:
            ValueError: an argument is out of range, or the file has a line that is not an edge.
        """
        epochs = 0 if epochs is None else epochs
        check_whole(factors=(factors, 1), batch_edges=(batch_edges, 1), epochs=(epochs, 0), seed=(seed, 0))
        check_number("learning_rate", learning_rate, below=1)
        check_number("regularization", regularization, below=1)
        import torch

        graph = load_graph(edges, nodes, seed)
        self._checksum = graph.checksum
        generator = np.random.default_rng(seed)
        values = graph.values if graph.values is not None else _hidden_values(graph, generator)
        self._scale = float(values.std()) or 1.0
        order = generator.permutation(len(values))
        self._sources, self._targets = (torch.from_numpy(ends[order]) for ends in (graph.sources, graph.targets))
        self._values = torch.from_numpy(((values - values.mean()) / self._scale)[order].astype(np.float32))
        shape = (len(graph.ids), factors)
        self.rows, self.columns = (
            torch.from_numpy(generator.normal(0, 0.5 / math.sqrt(factors), shape).astype(np.float32)) for _ in range(2)
        )
        self._counts = torch.zeros(len(graph.ids))  # edges of a batch at each node; 0 between steps
        self._squares = torch.zeros((), dtype=torch.float64)  # sum of this epoch's squared errors
        self._batch, self._epochs = batch_edges, epochs
        self._rate, self._regularization = learning_rate, regularization
        self._epoch, self._position = 0, 0
        if epochs:
            self.context.total_work = float(epochs * len(values))

    def init(self) -> None:
        """Move to the device, and run a step on copies there, since the first step is slow."""
        device = self.context.device
        self._sources, self._targets = self._sources.to(device), self._targets.to(device)
        self._values, self._counts = self._values.to(device), self._counts.to(device)
        self._squares = self._squares.to(device)
        self.rows, self.columns = self.rows.to(device), self.columns.to(device)
        self._learn(slice(0, self._batch), self.rows.clone(), self.columns.clone())

    def run_next_step(self) -> float:
        if self._epochs and self._epoch >= self._epochs:
            raise StopIteration
        batch = slice(self._position, min(self._position + self._batch, len(self._values)))
        self._squares += self._learn(batch, self.rows, self.columns)
        self._position = batch.stop
        if self._position == len(self._values):
            self._end_epoch()
        return float(batch.stop - batch.start)

    def state_dict(self) -> dict[str, Any]:
        return {
            "graph": self._checksum,
            "rows": self.rows.cpu(),
            "columns": self.columns.cpu(),
            "epoch": self._epoch,
            "position": self._position,
            "squares": self._squares.item(),
            "result": dict(self.context.result),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state.

        Raises:
            ValueError: the state is that of another graph.
        """
        check_same_graph(self._checksum, state)
        self.rows, self.columns = state["rows"], state["columns"]
        self._epoch, self._position = state["epoch"], state["position"]
        self._squares.fill_(state["squares"])
        self.context.report(**state["result"])

    def _learn(self, batch: slice, all_rows: Any, all_columns: Any) -> Any:
        """Do a step of SGD; return the sum of the squared errors before it."""
        sources, targets, values = self._sources[batch], self._targets[batch], self._values[batch]
        rows, columns = all_rows.index_select(0, sources), all_columns.index_select(0, targets)
        errors = values - (rows * columns).sum(1)
        lengths = rows.square().sum(1) + columns.square().sum(1)
        gain = (self._rate * errors / (1 + lengths)).unsqueeze(1)
        decay = self._rate * self._regularization
        self._add_means(all_rows, sources, gain * columns - decay * rows)
        self._add_means(all_columns, targets, gain * rows - decay * columns)
        return errors @ errors

    def _add_means(self, table: Any, index: Any, changes: Any) -> None:
        """Add to each row of ``table`` the mean of its changes, those with the row's number in ``index``."""
        self._counts.index_add_(0, index, changes.new_ones(len(index)))
        table.index_add_(0, index, changes / self._counts.index_select(0, index).unsqueeze(1))
        self._counts.index_fill_(0, index, 0.0)

    def _end_epoch(self) -> None:
        self._epoch += 1
        rmse = self._scale * math.sqrt(self._squares.item() / len(self._values))
        self.context.report(epoch=self._epoch, rmse=rmse)
        self._position = 0
        self._squares.zero_()


def _hidden_values(graph: Graph, generator: np.random.Generator) -> np.ndarray:
    rows, columns = generator.normal(0, 1 / math.sqrt(2), (2, len(graph.ids), 4))
    exact = np.einsum("ij,ij->i", rows[graph.sources], columns[graph.targets])
    return exact + generator.normal(0, 0.1, len(exact))

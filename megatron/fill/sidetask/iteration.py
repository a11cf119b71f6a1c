"""The nodes of an optimizer step, and the progress of a training job in its data."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron.fill.errors import TaskError
from megatron.fill.sidetask.data import Samples


@dataclass(eq=False)
class NodeIteration:
    """The nodes of an optimizer step: forward and backward passes, one microbatch at a time, then the optimizer, one
    group of parameters at a time.
    """

    batch_size: int
    micro_batch: int
    pieces: int  # greatest number of pieces of any split of the model
    groups: int
    begin_pass: Callable[[list[Any]], tuple[Any, Any]]  # of a microbatch's samples: a runner with inputs, their target
    loss_of: Callable[[Any, Any], Any]  # of output and target: a scalar

    def __post_init__(self) -> None:
        self._nodes: list[tuple[str, int, int]] = []  # phase, microbatch, piece or group
        for micro in range(self.batch_size // self.micro_batch):
            self._nodes += [("forward", micro, piece) for piece in range(self.pieces)]
            self._nodes += [("loss", micro, 0)]
            self._nodes += [("backward", micro, piece) for piece in reversed(range(self.pieces))]
        self._nodes += [("optimizer", 0, group) for group in range(self.groups)]

    def names(self) -> tuple[str, ...]:
        """The names of the nodes, in order."""
        return tuple(
            (f"micro-batch {micro} " if self.batch_size > self.micro_batch and phase != "optimizer" else "")
            + (phase if phase == "loss" else f"{phase} {index}")
            for phase, micro, index in self._nodes
        )

    def begin(self, batch: list[Any], learning: bool = True) -> None:
        """Start with this batch at the first node; without learning, only forward and loss nodes run."""
        self.batch, self._learning = batch, learning
        self.loss = 0.0  # sum of the microbatches' losses so far, each weighted by its share of the batch

    def group(self, node: int) -> int | None:
        """The group of parameters that a node updates; None for a node of a forward or backward pass."""
        phase, _, index = self._nodes[node]
        return index if phase == "optimizer" else None

    def run(self, node: int) -> None:
        """Run a node of a forward or backward pass."""
        phase, micro, piece = self._nodes[node]
        if phase == "forward":
            if piece == 0:
                samples = self.batch[micro * self.micro_batch : (micro + 1) * self.micro_batch]
                self._share = len(samples) / len(self.batch)
                self._runner, self._target = self.begin_pass(samples)
            self._runner.forward(piece)
        elif phase == "loss":
            self.loss += self._runner.loss(lambda output: self.loss_of(output, self._target) * self._share)
        else:
            self._runner.backward(piece)

    def after(self, node: int) -> int:
        """The next node of this batch, which may have fewer nodes as an epoch's last batch; 0 after the last node."""
        micros, pieces = -(-len(self.batch) // self.micro_batch), len(self._runner.split.segments)
        for at in range(node + 1, len(self._nodes)):
            phase, micro, index = self._nodes[at]
            if not self._learning and phase in ("backward", "optimizer"):
                continue
            if phase == "optimizer" or (micro < micros and (phase == "loss" or index < pieces)):
                return at
        return 0

    def clear(self) -> None:
        """Free the tensors that the passes hold."""
        self._runner.clear()


@dataclass(eq=False)
class Course:
    """The progress of a training job in its data: the epochs and iterations done."""

    samples: Samples
    seed: int  # seed of the order of the samples
    batch_size: int
    epochs: int | None  # number after which it ends; None if ``steps``, a number of iterations, is given
    steps: int | None
    epoch_ended: Callable[[], None]

    def __post_init__(self) -> None:
        self.epoch = self._position = self.iteration = 0  # _position: samples done in this epoch
        self._stream: Iterator[Any] | None = None
        self.total_work = self._total_work()  # number of samples; None if unknown

    @property
    def finished(self) -> bool:
        done, wanted = (self.iteration, self.steps) if self.epochs is None else (self.epoch, self.epochs)
        return done >= (wanted or 0)

    def next_batch(self) -> list[Any]:
        """The samples of the next batch; after the end of an iterable's epoch, those of the next epoch.

        Raises:
            StopIteration: the last epoch has ended.
            TaskError: an epoch has no samples.
        """
        for _ in range(2):
            if self._stream is None:
                self._stream = self.samples.epoch(self.seed, self.epoch, self._position)
            batch = list(itertools.islice(self._stream, self.batch_size))
            if batch:
                return batch
            if self._position == 0:
                break
            self._end_epoch()
            if self.finished:
                raise StopIteration
        raise TaskError(f"data has 0 samples in epoch {self.epoch}: expected at least 1")

    def commit(self, count: int) -> None:
        """Record an iteration of ``count`` samples."""
        self.iteration += 1
        self._position += count
        if self._position == self.samples.length:
            self._end_epoch()

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self._position, "iteration": self.iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self._position, self.iteration = state["epoch"], state["position"], state["iteration"]

    def _end_epoch(self) -> None:
        self.epoch += 1
        self._position, self._stream = 0, None
        self.epoch_ended()

    def _total_work(self) -> float | None:
        length, batch = self.samples.length, self.batch_size
        if length is None:
            return None if self.steps is None else float(self.steps * batch)
        if self.steps is None:
            return float((self.epochs or 0) * length)
        epochs, rest = divmod(self.steps, -(-length // batch))
        return float(epochs * length + min(rest * batch, length))

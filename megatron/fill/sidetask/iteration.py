"""One step of an optimizer as nodes, and how far a training has come in its data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from megatron.fill.errors import TaskError
from megatron.fill.sidetask.data import Samples


class NodeIteration:
    """The nodes of one optimizer step: a batch passes through the model micro-batch by micro-batch, then the
    optimizer steps for a group of parameters at a time.

    Args:
        batch_size, micro_batch: samples.
        pieces: the most that a micro-batch of any shape is split into.
        groups: of parameters.
        begin_pass: takes a micro-batch's samples; gives a runner that has their inputs, and their target.
        loss: of (output, target): a scalar.

    Attributes:
        batch: the samples.
        loss: the mean over the samples that have passed through so far.
    """

    def __init__(
        self,
        batch_size: int,
        micro_batch: int,
        pieces: int,
        groups: int,
        begin_pass: Callable[[list[Any]], tuple[Any, Any]],
        loss: Callable[[Any, Any], Any],
    ) -> None:
        self._micro_batch = micro_batch
        self._begin_pass, self._loss_of = begin_pass, loss
        self._nodes: list[tuple[str, int, int]] = []  # phase, micro-batch, piece or group
        for micro in range(batch_size // micro_batch):
            self._nodes += [("forward", micro, piece) for piece in range(pieces)]
            self._nodes += [("loss", micro, 0)]
            self._nodes += [("backward", micro, piece) for piece in reversed(range(pieces))]
        self._nodes += [("optimizer", 0, group) for group in range(groups)]
        self._many = batch_size > micro_batch

    def names(self) -> tuple[str, ...]:
        """Of the nodes, in order."""
        return tuple(
            (f"micro-batch {micro} " if self._many and phase != "optimizer" else "")
            + (phase if phase == "loss" else f"{phase} {index}")
            for phase, micro, index in self._nodes
        )

    def begin(self, batch: list[Any], learning: bool = True) -> None:
        """The nodes from the first one on are for this batch; without learning it has forward nodes and losses only."""
        self.batch, self.loss, self._learning = batch, 0.0, learning

    def group(self, node: int) -> int | None:
        """The group of parameters that a node steps; None for a node that passes the batch through."""
        phase, _, index = self._nodes[node]
        return index if phase == "optimizer" else None

    def run(self, node: int) -> None:
        """Run a node that passes the batch through."""
        phase, micro, piece = self._nodes[node]
        if phase == "forward":
            if piece == 0:
                samples = self.batch[micro * self._micro_batch : (micro + 1) * self._micro_batch]
                self._share = len(samples) / len(self.batch)
                self._runner, self._target = self._begin_pass(samples)
            self._runner.forward(piece)
        elif phase == "loss":
            self.loss += self._runner.loss(lambda output: self._loss_of(output, self._target) * self._share)
        else:
            self._runner.backward(piece)

    def after(self, node: int) -> int:
        """The next node that this batch has, since the last batch of an epoch may be smaller; 0 after the last one."""
        micros, pieces = -(-len(self.batch) // self._micro_batch), len(self._runner.split.segments)
        for at in range(node + 1, len(self._nodes)):
            phase, micro, index = self._nodes[at]
            if not self._learning and phase in ("backward", "optimizer"):
                continue
            if phase == "optimizer" or (micro < micros and (phase == "loss" or index < pieces)):
                return at
        return 0

    def clear(self) -> None:
        """Give back what the passes hold."""
        self._runner.clear()


class Course:
    """How far a training has come in its data.

    Args:
        seed: of the order.
        epochs, steps: when it ends: one of the two.
        epoch_ended: called at every end of an epoch.

    Attributes:
        epoch, iteration: done.
        total_work: samples in all; None if nobody can know.
    """

    def __init__(
        self,
        samples: Samples,
        seed: int,
        batch_size: int,
        epochs: int | None,
        steps: int | None,
        epoch_ended: Callable[[], None],
    ) -> None:
        self._samples, self._seed, self._batch_size = samples, seed, batch_size
        self._epochs, self._steps, self._epoch_ended = epochs, steps, epoch_ended
        self.epoch = self._position = self.iteration = 0  # the position is in samples of this epoch
        self._stream: Iterator[Any] | None = None
        self.total_work = self._total_work()

    @property
    def finished(self) -> bool:
        done, wanted = (self.iteration, self._steps) if self._epochs is None else (self.epoch, self._epochs)
        return done >= (wanted or 0)

    def next_batch(self) -> list[Any]:
        """The next samples; at the end of an iterable's epoch, those of the next epoch.

        Raises:
            StopIteration: that end is the training's.
            TaskError: an epoch has no samples.
        """
        for _ in range(2):
            if self._stream is None:
                self._stream = self._samples.epoch(self._seed, self.epoch, self._position)
            batch = [sample for _, sample in zip(range(self._batch_size), self._stream, strict=False)]
            if batch:
                return batch
            if self._position == 0:
                break
            self._end_epoch()
            if self.finished:
                raise StopIteration
        raise TaskError(f"data has 0 samples in epoch {self.epoch}: expected at least 1")

    def commit(self, count: int) -> None:
        """An iteration of so many samples is done."""
        self.iteration += 1
        self._position += count
        if self._position == self._samples.length:
            self._end_epoch()

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self._position, "iteration": self.iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self._position, self.iteration = state["epoch"], state["position"], state["iteration"]

    def _end_epoch(self) -> None:
        self.epoch += 1
        self._position, self._stream = 0, None
        self._epoch_ended()

    def _total_work(self) -> float | None:
        length, batch = self._samples.length, self._batch_size
        if length is None:
            return None if self._steps is None else float(self._steps * batch)
        if self._steps is None:
            return float((self._epochs or 0) * length)
        epochs, rest = divmod(self._steps, -(-length // batch))
        return float(epochs * length + min(rest * batch, length))

"""A model-training side task with real data that is small enough for a CPU (after FreeRide, section 6)."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from megatron.fill.sidetask.base import SideTask
from megatron.fill.sidetask.checks import check_whole
from megatron.fill.sidetask.state import on_cpu

_SPLIT_SEED = 20240501
_TEST_SAMPLES = 360  # of 1797
_TRAIN, _TEST = range(2)  # kinds of steps


class DigitsTraining(SideTask):
    """Training of a small convolutional net on scikit-learn's handwritten digits: 1437 for training, 360 for testing.

    A step is an optimizer step on one batch or, at the end of an epoch, a test with as many images as two batches.
    Only training samples count as work.  After each epoch the task reports ``accuracy`` (on the test images, 0 to 1)
    and ``epoch``.  An interrupted and resumed run ends, on a CPU, with bit-identical weights.
    """

    unit: ClassVar[str] = "samples"

    def create(self, batch_size: int = 64, epochs: int | None = 20, seed: int = 0, learning_rate: float = 0.05) -> None:
        """Load the data and initialise the net.

        Args:
            batch_size: samples per step.
            epochs: passes over the training samples; None or 0 to continue until the training of the run ends.
            seed: seed of the initial weights and of the order of the samples.  The split into training and test
                samples is always the same.
            learning_rate: learning rate of SGD with momentum 0.9.

        Raises:
            ValueError: an argument is out of range.
        """
        epochs = 0 if epochs is None else epochs
        check_whole(batch_size=(batch_size, 1), epochs=(epochs, 0), seed=(seed, 0))
        if type(learning_rate) not in (int, float) or not 0 < learning_rate < math.inf:
            raise ValueError(f"learning_rate is {learning_rate!r}: expected a number above 0")
        import torch
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(_SPLIT_SEED).permutation(len(images))
        # scikit-learn's pixels are 0 to 16
        self._images = torch.tensor(images[order], dtype=torch.float32).view(-1, 1, 8, 8) / 16
        self._labels = torch.tensor(labels[order])
        self._samples = len(images) - _TEST_SAMPLES  # the test images are the last ones
        self._batch_size, self._epochs, self._seed, self._learning_rate = batch_size, epochs, seed, learning_rate
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = _net()
        self._optimizer = self._new_optimizer()
        self._epoch = 0  # epochs done
        self._position = 0  # position in this epoch's order, then among the test images
        self._correct = 0  # correct ones of the test images seen in this epoch
        self._begin_epoch()
        if epochs:
            self.context.total_work = float(epochs * self._samples)

    def init(self) -> None:
        """Move net and data to the device, and run each batch shape once, since the first use is slow."""
        device = self.context.device
        self.model.to(device)
        self._images, self._labels = self._images.to(device), self._labels.to(device)
        state = self._optimizer.state_dict()  # loading it moves it to where the weights are now
        self._optimizer = self._new_optimizer()
        self._optimizer.load_state_dict(state)
        for count in {min(self._batch_size, self._samples), self._samples % self._batch_size} - {0}:
            self._loss(self._order[:count]).backward()
        self._optimizer.zero_grad()
        for first in range(0, _TEST_SAMPLES, 2 * self._batch_size):
            self._count_correct(first)

    def run_next_step(self) -> float:
        if self._epochs and self._epoch >= self._epochs:
            raise StopIteration
        work = self._train() if self._position < self._samples else self._test()
        self.next_node = _TRAIN if self._position < self._samples else _TEST
        return work

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": on_cpu(dict(self.model.state_dict())),
            "optimizer": on_cpu(self._optimizer.state_dict()),
            "epoch": self._epoch,
            "position": self._position,
            "correct": self._correct,
            "result": dict(self.context.result),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._epoch, self._correct = state["epoch"], state["correct"]
        self._begin_epoch()
        self._position = state["position"]
        self.next_node = _TRAIN if self._position < self._samples else _TEST
        self.context.report(**state["result"])

    def _train(self) -> float:
        rows = self._order[self._position : self._position + self._batch_size]
        self._optimizer.zero_grad()
        self._loss(rows).backward()
        self._optimizer.step()
        self._position += len(rows)
        return float(len(rows))

    def _test(self) -> float:
        self._correct += self._count_correct(self._position - self._samples)
        self._position += 2 * self._batch_size
        if self._position >= self._samples + _TEST_SAMPLES:
            self._epoch += 1
            self.context.report(accuracy=self._correct / _TEST_SAMPLES, epoch=self._epoch)
            self._correct = 0
            self._begin_epoch()
        return 0.0

    def _begin_epoch(self) -> None:
        # The order depends on seed and epoch alone, so a checkpoint needs no generator state.
        self._order = np.random.default_rng((self._seed, self._epoch)).permutation(self._samples)
        self._position = 0

    def _loss(self, rows: np.ndarray) -> Any:
        import torch

        index = torch.from_numpy(rows).to(self.context.device)
        return torch.nn.functional.cross_entropy(self.model(self._images[index]), self._labels[index])

    def _count_correct(self, first: int) -> int:
        import torch

        begin = self._samples + first
        rows = slice(begin, begin + 2 * self._batch_size)
        with torch.no_grad():
            return int((self.model(self._images[rows]).argmax(dim=1) == self._labels[rows]).sum())

    def _new_optimizer(self) -> Any:
        import torch

        return torch.optim.SGD(self.model.parameters(), lr=self._learning_rate, momentum=0.9)


def _net() -> Any:
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )

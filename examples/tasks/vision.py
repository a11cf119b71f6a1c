"""Training of an image classifier, step by step (FreeRide, section 6: ResNet18, ResNet50 and VGG19)."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from megatron.fill.sidetask.base import SideTask
from megatron.fill.sidetask.checks import check_whole
from megatron.fill.sidetask.data import RandomData, Samples, collate, load_object
from megatron.fill.sidetask.models import build_model, find_workload
from megatron.fill.sidetask.state import on_cpu

_PASS, _UPDATE = range(2)  # kinds of steps
_REPORT_EVERY = 100  # updates


class ImageTraining(SideTask):
    """Training of an image model of ``megatron.fill.models`` with SGD, on random images or on a given data set.

    A step is a forward and backward pass over one microbatch, or the optimizer's update after the microbatches of a
    batch.  As always with gradient accumulation, BatchNorm sees one microbatch at a time.  The task reports ``loss``
    (the mean since the last report), ``epoch`` and ``updates``.

    The device holds all images, so that the host has nothing to do in a step.  ``TrainingJob`` loads larger data sets
    batch by batch, and trains the same models in nodes, for bubbles shorter than the pass of a single image.
    """

    unit: ClassVar[str] = "images"

    def create(
        self,
        model: str = "resnet18",
        model_args: dict[str, Any] | None = None,
        data: str | None = None,
        data_args: dict[str, Any] | None = None,
        batch_size: int = 64,
        micro_batch: int | None = None,
        updates: int | None = None,
        learning_rate: float = 0.01,
        seed: int = 0,
    ) -> None:
        """Build the model and the data.

        Args:
            model: ``resnet18``, ``resnet50``, ``vgg19``, or another image model of ``models.MODELS``.
            model_args: as for ``build_model``.
            data: ``module:factory`` of a data set of ``(image, class)``; None for random images.
            data_args: arguments of the factory, or of ``RandomData``.
            batch_size: images per update; an epoch's last batch may have fewer.
            micro_batch: greatest number of images per step; None for the whole batch.
            updates: number of updates; None to continue until the training of the run ends.
            learning_rate: learning rate of SGD with momentum 0.9.
            seed: seed of the weights and of the order of the images.

        Raises:
            ValueError: an argument is wrong.
            TaskError: timm is not installed.
        """
        import torch

        micro_batch = batch_size if micro_batch is None else micro_batch
        check_whole(batch_size=(batch_size, 1), micro_batch=(micro_batch, 1), seed=(seed, 0))
        check_whole(updates=(1 if updates is None else updates, 1))
        if micro_batch > batch_size:
            raise ValueError(f"micro_batch is {micro_batch}: expected at most batch_size, which is {batch_size}")
        if type(learning_rate) not in (int, float) or not 0 < learning_rate < math.inf:
            raise ValueError(f"learning_rate is {learning_rate!r}: expected a number above 0")
        if find_workload(model).is_text:
            raise ValueError(f"model is {model!r}: expected an image model; TrainingJob trains text models")
        fields = {"size": "full"} | (model_args or {})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = build_model(model, **fields)
        args = data_args or {}
        self._samples = Samples(
            RandomData(model, **fields | args) if data is None else load_object("data", data)(**args)
        )
        if self._samples.length is None:
            raise ValueError("data has no length: expected a data set with a length and indices")
        self._images, self._classes = collate(self._samples.first(self._samples.length), "cpu")
        self._length = self._samples.length
        self._batch_size, self._micro, self._updates, self._seed = batch_size, micro_batch, updates, seed
        self._rate = learning_rate
        self._optimizer = self._new_optimizer()
        self._epoch = self._position = self._update = 0  # epochs done; images done in this one; updates done
        self._loss: Any = 0.0  # summed over the updates since the last report
        self._counted = 0  # number of these updates
        self._left: list[int] = []  # images of this batch that have not been passed yet
        self._batch_count = 0  # number of images in this batch
        self._batch_loss: Any = 0.0
        self._set_total()

    def init(self) -> None:
        """Move to the device, and run a microbatch through the model there, since the first use is slow."""
        from megatron.fill.sidetask.split.runner import restored

        device = self.context.device
        self.model.to(device).train()
        self._images, self._classes = self._images.to(device), self._classes.to(device)
        state = self._optimizer.state_dict()  # loading it moves it to where the weights are now
        self._optimizer = self._new_optimizer()
        self._optimizer.load_state_dict(state)
        with restored(list(self.model.buffers())):
            self._pass(list(range(min(self._micro, self._length))), 1.0)
        self._begin_batch()

    def run_next_step(self) -> float:
        """Do a pass or an update; only updates count as work."""
        if self._updates is not None and self._update >= self._updates:
            raise StopIteration
        if self.next_node == _UPDATE:
            return self._finish_batch()
        count = min(self._micro, len(self._left))
        self._batch_loss = self._batch_loss + self._pass(self._left[:count], count / self._batch_count)
        self._left = self._left[count:]
        self.next_node = _PASS if self._left else _UPDATE
        return 0.0

    def state_dict(self) -> dict[str, Any]:
        """The state at the beginning of this batch, whose passes so far are repeated."""
        return {
            "model": {name: on_cpu(self._began.get(name, value)) for name, value in self.model.state_dict().items()},
            "optimizer": on_cpu(self._optimizer.state_dict()),
            "epoch": self._epoch,
            "position": self._position,
            "update": self._update,
            "loss": [float(self._loss), self._counted],
            "result": dict(self.context.result),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._epoch, self._position, self._update = state["epoch"], state["position"], state["update"]
        self._loss, self._counted = state["loss"]
        self.context.report(**state["result"])

    def _pass(self, indices: list[int], share: float) -> Any:
        """Run forward and backward; return the mean loss times ``share``, the images' share of the batch."""
        import torch
        from torch.nn.functional import cross_entropy

        index = torch.tensor(indices, device=self.context.device)
        loss = cross_entropy(self.model(self._images[index]), self._classes[index]) * share
        loss.backward()
        return loss.detach()

    def _begin_batch(self) -> None:
        import torch

        torch.manual_seed(self._seed + self._update)  # so that layers draw the same numbers if the batch is repeated
        order = list(self._samples.order(self._seed, self._epoch))
        self._left = order[self._position : self._position + self._batch_size]
        self._batch_count, self._batch_loss = len(self._left), 0.0
        self._began = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        self._optimizer.zero_grad()
        self.next_node = _PASS

    def _finish_batch(self) -> float:
        self._optimizer.step()
        work = float(self._batch_count)
        self._update += 1
        self._position += self._batch_count
        self._loss, self._counted = self._loss + self._batch_loss, self._counted + 1
        ended = self._position == self._length
        if ended:
            self._epoch, self._position = self._epoch + 1, 0
        if ended or self._update % _REPORT_EVERY == 0 or self._update == self._updates:
            mean = float(self._loss) / self._counted
            self.context.report(loss=mean, epoch=self._epoch, updates=self._update)
            self._loss, self._counted = 0.0, 0
        self._begin_batch()
        return work

    def _set_total(self) -> None:
        if self._updates is not None:
            epochs, rest = divmod(self._updates, -(-self._length // self._batch_size))
            self.context.total_work = float(epochs * self._length + min(rest * self._batch_size, self._length))

    def _new_optimizer(self) -> Any:
        import torch

        return torch.optim.SGD(self.model.parameters(), lr=self._rate, momentum=0.9)

"""``TrainingJob``: trains any ``torch.nn.Module`` in pieces (PipeFill, section 4.2)."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

from megatron.fill.errors import TaskError
from megatron.fill.profiles import Configuration, Offload
from megatron.fill.sidetask.checks import check_whole
from megatron.fill.sidetask.data import classification_loss, load_object
from megatron.fill.sidetask.modeljob import ModelJob
from megatron.fill.sidetask.models import WORKLOADS

_REPORT_EVERY = 100  # iterations


class TrainingJob(ModelJob):
    """Trains a model: subclass it and override ``build_model``, ``build_data``, ``build_optimizer`` and ``loss``, or
    name them in the jobs file.

    An iteration is one step of the optimizer.  Its nodes: for each micro-batch, the pieces forward, the loss, the
    pieces backward; then the optimizer, a few parameters at a time.  No configuration changes what is learnt, but for
    the order in which micro-batches' gradients are summed, and for dropout, whose masks are drawn per micro-batch.
    Interrupted and resumed it ends, on a CPU, in the same weights bit for bit.  It reports ``loss`` (the mean since the
    last report), ``epoch`` and ``iteration``.
    """

    def create(
        self,
        model: str | None = None,
        model_args: dict[str, Any] | None = None,
        data: str | None = None,
        data_args: dict[str, Any] | None = None,
        optimizer: str = "torch.optim:AdamW",
        optimizer_args: dict[str, Any] | None = None,
        loss: str | None = None,
        batch_size: int = 8,
        micro_batch_sizes: list[int] | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        seed: int = 0,
        pieces: int = 24,
        split: str = "auto",
    ) -> None:
        """Build model, data and optimizer.

        Args:
            model, data, optimizer: ``module:factory``; ``model`` may be a name of ``models.WORKLOADS``, which has
                random data and a loss.
            loss: ``module:function`` of (output, target), the *mean* over the samples.
            batch_size: samples a step of the optimizer.
            micro_batch_sizes: how many of them may pass through the model at a time; None for all divisors.
            epochs, steps: when to end: one of the two.
            seed: of weights, order and dropout.
            pieces, split: as for ``split_model``.

        Raises:
            ValueError: an argument is wrong.
            TaskError: something cannot be built or split.
        """
        import torch

        check_whole(batch_size=(batch_size, 1))
        if (epochs is None) == (steps is None):
            raise ValueError(f"epochs is {epochs!r} and steps is {steps!r}: expected one of the two")
        check_whole(**({"epochs": (epochs, 1)} if steps is None else {"steps": (steps, 1)}))
        self._micro_sizes = _divisors(batch_size, micro_batch_sizes)
        args = {"model": model, "model_args": model_args, "data": data, "data_args": data_args, "loss": loss}
        self._prepare(args | {"optimizer": optimizer, "optimizer_args": optimizer_args or {}}, seed, pieces, split)
        self._loss_function = self._find_loss()
        self.model.train()
        self._norms = any(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in self.model.modules())
        if self._norms:
            if batch_size not in self._micro_sizes:
                raise ValueError(f"micro_batch_sizes is {micro_batch_sizes}: a model with BatchNorm needs {batch_size}")
            self._micro_sizes = [batch_size]  # its statistics are those of what passes through at a time
        self._make_optimizer()
        closure = inspect.signature(self.optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ValueError(f"optimizer is {optimizer!r}: it needs a closure: expected one that steps without")
        self._batch_size, self._epochs, self._steps = batch_size, epochs, steps
        self._epoch = self._position = self._iteration = 0  # epochs done; samples done in this one; steps done
        self._losses: list[float] = []  # of the iterations since the last report
        self._left: dict[str, Any] | None = None  # of a checkpoint between two optimizer nodes
        self._configuration = self.configurations()[0]
        self._set_total()

    def _make_optimizer(self) -> None:
        from megatron.fill.sidetask.optimizing import Slices, is_elementwise

        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        if not named:
            raise ValueError("model has no parameter that can be trained")
        self._slices = Slices(named, self._pieces if self.context.device == "cpu" else 1)
        self.optimizer = self.build_optimizer([p for _, p in self._slices.parameters])
        if not is_elementwise(self.optimizer):
            self._slices = Slices(named, 1)
            self.optimizer = self.build_optimizer([p for _, p in self._slices.parameters])
        self._parameters = [p for _, p in self._slices.parameters]

    def build_optimizer(self, parameters: list[Any]) -> Any:
        """The optimizer of these parameters, or rows of parameters."""
        return load_object("optimizer", self._args["optimizer"])(parameters, **self._args["optimizer_args"])

    def loss(self, output: Any, target: Any) -> Any:
        """A scalar: the mean loss over the samples of a batch."""
        return self._loss_function(output, target)

    def configurations(self) -> list[Configuration]:
        """The micro-batches that divide the batch, with checkpointing or not; offload only where there is a device.

        A model with BatchNorm is offered its whole batch only.
        """
        offloads = [(Offload.NONE, False), (Offload.NONE, True)]
        if self.context.device != "cpu":
            offloads += [(Offload.OPTIMIZER, False), (Offload.OPTIMIZER, True), (Offload.WEIGHTS, True)]
        return [Configuration(b, again, offload) for b in self._micro_sizes for offload, again in offloads]

    def init(self) -> None:
        """Move to the device, split the model for each batch shape, and try each split once: the first use is slow."""
        from megatron.fill.sidetask.split import Randomness

        self.model.to(self.context.device)
        self.optimizer.load_state_dict(self.optimizer.state_dict())  # moves its state to where the weights are
        self._random = Randomness(self.context.device, self._seed)
        if self._left is not None:
            self._finish_step(self._left)
            self._left = None
        self._arrange()
        self._stream: Iterator[Any] | None = None
        self._pending: int | None = None  # the optimizer node that comes next, while they run

    def node_names(self) -> tuple[str, ...]:
        many = self._batch_size > self._configuration.batch_size
        return tuple(
            (f"micro-batch {micro} " if many and phase != "optimizer" else "")
            + (phase if phase == "loss" else f"{phase} {index}")
            for phase, micro, index in self._nodes
        )

    def iteration_work(self) -> float:
        return float(self._batch_size)

    def run_next_step(self) -> float:
        """Run one node; an iteration's work comes with its first optimizer node, from which on it is never redone."""
        if self.next_node == 0:
            self._begin_iteration()
        phase, micro, index = self._nodes[self.next_node]
        work = 0.0
        if phase == "forward":
            if index == 0:
                self._begin_micro_batch(micro)
            self._runner.forward(index)
        elif phase == "loss":
            share = self._runner_samples / len(self._batch)
            self._loss_sum += self._runner.loss(lambda output: self._checked_loss(output, self._target) * share)
        elif phase == "backward":
            self._runner.backward(index)
        else:
            if index == 0:
                work = self._commit()
            self._optimize(index)
        self._synchronize()
        self._advance()
        return work

    def state_dict(self) -> dict[str, Any]:
        """The state when the present iteration began; between optimizer nodes, with the gradients not yet used."""
        started = self.next_node > 0 and self._pending is None
        buffers = self._buffers if started else {}
        state: dict[str, Any] = {
            "model": {k: _on_cpu(buffers.get(k, v)) for k, v in self.model.state_dict().items()},
            "optimizer": _on_cpu(self.optimizer.state_dict()),
            "epoch": self._epoch,
            "position": self._position,
            "iteration": self._iteration,
            "losses": list(self._losses),
            "result": dict(self.context.result),
        }
        if self._pending is not None:
            named = self._slices.parameters
            state["gradients"] = {name: _on_cpu(p.grad) for name, p in named if p.grad is not None}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._epoch, self._position, self._iteration = state["epoch"], state["position"], state["iteration"]
        self._losses = list(state["losses"])
        self._left = state.get("gradients")
        self.context.report(**state["result"])

    def _find_loss(self) -> Any:
        if self._args["loss"] is not None:
            return load_object("loss", self._args["loss"])
        if self._args["model"] in WORKLOADS:
            return classification_loss
        if type(self).loss is TrainingJob.loss:
            raise ValueError("loss is None: expected module:function, or a subclass that overrides loss()")
        return None

    def _set_total(self) -> None:
        length, batch = self._samples.length, self._batch_size
        if length is None:
            self.context.total_work = None if self._steps is None else float(self._steps * batch)
        elif self._steps is None:
            self.context.total_work = float((self._epochs or 0) * length)
        else:
            epochs, rest = divmod(self._steps, -(-length // batch))
            self.context.total_work = float(epochs * length + min(rest * batch, length))

    def _arrange(self) -> None:
        """Split for the present micro-batch and for what is left at the end of an epoch, and list the nodes."""
        from megatron.fill.sidetask.optimizing import Offloaded, group_parameters

        size, length = self._configuration.batch_size, self._samples.length
        self._offloaded = Offloaded(self._configuration.offload, self.context.device)
        first, *others = (self._try(count) for count in self._sizes(size, length))
        self.split = first.how
        count = max(len(s.segments) for s in (first, *others))
        micros = self._batch_size // size
        self._groups = group_parameters(self.optimizer, self._parameters, self._pieces)
        self._nodes = [
            *(
                node
                for m in range(micros)
                for node in (
                    *(("forward", m, i) for i in range(count)),
                    ("loss", m, 0),
                    *(("backward", m, i) for i in reversed(range(count))),
                )
            ),
            *(("optimizer", 0, i) for i in range(len(self._groups))),
        ]
        self._offloaded.keep(self.model, self.optimizer)
        self.next_node = 0

    def _sizes(self, size: int, length: int | None) -> list[int]:
        """All sizes of micro-batches that can come, the usual one first."""
        if length is None:
            return [size]
        full = [size] if length >= size else []
        return [*full, *([length % self._batch_size % size] if length % self._batch_size % size else [])]

    def _try(self, count: int) -> Any:
        """Split for a batch of so many samples, and take it forward and backward once."""
        from megatron.fill.sidetask.split import Call, PieceRunner, Randomness, restored

        inputs, target = self._example(count)
        split = self._split_for(inputs)
        with restored(list(self.model.buffers())):
            runner = PieceRunner(split, Randomness(self.context.device, 0), True, self._configuration.checkpointing)
            runner.begin(Call(inputs).leaves)
            for index in range(len(split.segments)):
                runner.forward(index)
            runner.loss(lambda output: self._checked_loss(output, target))
            for index in reversed(range(len(split.segments))):
                runner.backward(index)
            del runner
        self.model.zero_grad()
        return split

    def _checked_loss(self, output: Any, target: Any) -> Any:
        import torch

        value = self.loss(output, target)
        if not (isinstance(value, torch.Tensor) and value.ndim == 0 and value.requires_grad):
            raise TaskError(f"loss returned {value!r:.80}: expected a scalar tensor that depends on the model")
        return value

    def _begin_iteration(self) -> None:
        if self._finished():
            raise StopIteration
        self._random.seed(self._seed, self._iteration + 1)
        with self._random:  # a data set may draw random numbers
            self._batch = self._next_batch()
        self._buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        self._loss_sum = 0.0

    def _finished(self) -> bool:
        done, wanted = (self._iteration, self._steps) if self._epochs is None else (self._epoch, self._epochs)
        return done >= (wanted or 0)

    def _next_batch(self) -> list[Any]:
        """The next samples; at the end of an iterable's epoch, those of the next epoch."""
        for _ in range(2):
            if self._stream is None:
                self._stream = self._samples.epoch(self._seed, self._epoch, self._position)
            batch = [sample for _, sample in zip(range(self._batch_size), self._stream, strict=False)]
            if batch:
                return batch
            if self._position == 0:
                raise TaskError(f"data has 0 samples in epoch {self._epoch}: expected at least 1")
            self._end_epoch()
            if self._finished():
                raise StopIteration
        raise TaskError(f"data has 0 samples in epoch {self._epoch}: expected at least 1")

    def _begin_micro_batch(self, micro: int) -> None:
        from megatron.fill.sidetask.split import Call, PieceRunner

        size = self._configuration.batch_size
        samples = self._batch[micro * size : (micro + 1) * size]
        self._runner_samples = len(samples)
        inputs, self._target = self._collate(samples)
        self._runner = PieceRunner(
            self._split_for(inputs, prepared=False),
            self._random,
            training=True,
            checkpointing=self._configuration.checkpointing,
            resident=self._offloaded.weights,
        )
        self._runner.begin(Call(inputs).leaves)

    def _advance(self) -> None:
        """To the next node that this batch has: the last one of an epoch may be smaller."""
        micros = -(-len(self._batch) // self._configuration.batch_size)
        pieces = len(self._runner.split.segments)
        for at in range(self.next_node + 1, len(self._nodes)):
            phase, micro, index = self._nodes[at]
            if phase == "optimizer" or (micro < micros and (phase == "loss" or index < pieces)):
                self.next_node = at
                return
        self.next_node, self._pending = 0, None

    def _commit(self) -> float:
        """From here on the iteration counts as done."""
        self._runner.clear()
        self._slices.take_gradients()
        self._iteration += 1
        self._position += len(self._batch)
        self._losses.append(self._loss_sum)
        if self._position == self._samples.length:
            self._end_epoch()
        elif self._iteration % _REPORT_EVERY == 0 or self._iteration == self._steps:
            self._report()
        return float(len(self._batch))

    def _end_epoch(self) -> None:
        self._epoch += 1
        self._position, self._stream = 0, None
        self._report()

    def _report(self) -> None:
        if self._losses:
            mean = sum(self._losses) / len(self._losses)
            self.context.report(loss=mean, epoch=self._epoch, iteration=self._iteration)
            self._losses = []

    def _optimize(self, index: int) -> None:
        """One step for one group of parameters."""
        self._pending = index
        with self._offloaded.step(self.optimizer, self._groups[index]):
            from megatron.fill.sidetask.optimizing import step_group

            step_group(self.optimizer, self._groups[index])

    def _finish_step(self, gradients: dict[str, Any]) -> None:
        """The optimizer nodes that were left when the checkpoint was written."""
        for name, parameter in self._slices.parameters:
            if name in gradients:
                parameter.grad = gradients[name].to(self.context.device)
        self.optimizer.step()
        self.optimizer.zero_grad()


def _divisors(batch_size: int, wanted: list[int] | None) -> list[int]:
    if wanted is None:
        return [size for size in range(batch_size, 0, -1) if batch_size % size == 0]
    for size in wanted:
        if type(size) is not int or size < 1 or batch_size % size:
            raise ValueError(
                f"micro_batch_sizes is {wanted}: expected divisors of batch_size {batch_size}; {size} is not"
            )
    if not wanted:
        raise ValueError("micro_batch_sizes is []: expected at least one, or none at all")
    return sorted(set(wanted), reverse=True)


def _on_cpu(value: Any) -> Any:
    """With every tensor in host memory.

    What is there already is not copied: a state is written before the next step changes it.
    """
    if isinstance(value, dict):
        return {key: _on_cpu(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_on_cpu(entry) for entry in value)
    return value.detach().cpu() if hasattr(value, "detach") else copy.deepcopy(value)

"""``TrainingJob``: training of any ``torch.nn.Module``, in pieces (PipeFill, section 4.2)."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

from megatron.fill.errors import TaskError
from megatron.fill.profiles import Configuration, Offload
from megatron.fill.sidetask.checks import check_whole, divisors
from megatron.fill.sidetask.data import classification_loss, load_object
from megatron.fill.sidetask.iteration import Course, NodeIteration
from megatron.fill.sidetask.modeljob import ModelJob
from megatron.fill.sidetask.models import MODELS
from megatron.fill.sidetask.optimizing import Offloaded, Slices, group_parameters, is_elementwise, step_group
from megatron.fill.sidetask.state import on_cpu

_REPORT_EVERY = 100  # iterations


class TrainingJob(ModelJob):
    """Training of a model: subclass it and override ``build_model``, ``build_data``, ``build_optimizer`` and ``loss``,
    or name them in the jobs file.

    An iteration is one step of the optimizer.  Its nodes: for each microbatch, the pieces forward, the loss, the pieces
    backward; then the optimizer, a few parameters at a time.  The configuration changes the result only by the order in
    which microbatches' gradients are summed, and by dropout, whose masks are drawn per microbatch.  An interrupted and
    resumed job ends, on a CPU, with bit-identical weights.  It reports ``loss`` (the mean since the last report),
    ``epoch`` and ``iteration``.
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
            model: ``module:factory``, or a name of ``models.MODELS``, which has random data and a loss.
            model_args: arguments of that factory, or of ``build_model``.
            data: ``module:factory``.
            data_args: arguments of that factory, or of ``RandomData``.
            optimizer: ``module:factory``.
            optimizer_args: arguments of that factory, besides the parameters.
            loss: ``module:function`` of (output, target), the *mean* over the samples.
            batch_size: samples per optimizer step.
            micro_batch_sizes: allowed numbers of samples in a microbatch; None for all divisors of ``batch_size``.
            epochs: number of epochs after which to end; give this or ``steps``.
            steps: number of optimizer steps after which to end; give this or ``epochs``.
            seed: seed of weights, order and dropout.
            pieces: as for ``split_model``.
            split: as for ``split_model``.

        Raises:
            ValueError: an argument is wrong.
            TaskError: something cannot be built or split.
        """
        import torch

        check_whole(batch_size=(batch_size, 1))
        if (epochs is None) == (steps is None):
            raise ValueError(f"epochs is {epochs!r} and steps is {steps!r}: expected one of the two")
        check_whole(**({"epochs": (epochs, 1)} if steps is None else {"steps": (steps, 1)}))
        self._micro_sizes = divisors("micro_batch_sizes", micro_batch_sizes, batch_size)
        args = {"model": model, "model_args": model_args, "data": data, "data_args": data_args, "loss": loss}
        self._prepare(args | {"optimizer": optimizer, "optimizer_args": optimizer_args or {}}, seed, pieces, split)
        self._loss_function = self._find_loss()
        self.model.train()
        self._norms = any(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in self.model.modules())
        if self._norms:
            if batch_size not in self._micro_sizes:
                raise ValueError(f"micro_batch_sizes is {micro_batch_sizes}: a model with BatchNorm needs {batch_size}")
            self._micro_sizes = [batch_size]  # BatchNorm's statistics depend on the size of a microbatch
        self._make_optimizer()
        closure = inspect.signature(self.optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ValueError(f"optimizer is {optimizer!r}: it needs a closure: expected one that steps without")
        self._batch_size = batch_size
        self._course = Course(self._samples, seed, batch_size, epochs, steps, self._report)
        self.context.total_work = self._course.total_work
        self._losses: list[float] = []  # losses of the iterations since the last report
        self._left: dict[str, Any] | None = None  # gradients from a checkpoint between two optimizer nodes
        self._configuration = self.configurations()[0]

    def _make_optimizer(self) -> None:
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
        """Build the optimizer of these parameters, some of which are slices of parameters."""
        return load_object("optimizer", self._args["optimizer"])(parameters, **self._args["optimizer_args"])

    def loss(self, output: Any, target: Any) -> Any:
        """The mean loss over the samples of a batch, a scalar."""
        return self._loss_function(output, target)

    def configurations(self) -> list[Configuration]:
        """The allowed microbatch sizes, with and without checkpointing; with offloading only on a GPU.

        A model with BatchNorm has only the whole batch.
        """
        offloads = [(Offload.NONE, False), (Offload.NONE, True)]
        if self.context.device != "cpu":
            offloads += [(Offload.OPTIMIZER, False), (Offload.OPTIMIZER, True), (Offload.WEIGHTS, True)]
        return [Configuration(b, again, offload) for b in self._micro_sizes for offload, again in offloads]

    def init(self) -> None:
        """Move to the device, split the model for each batch shape, and run each split once: the first use is slow."""
        from megatron.fill.sidetask.split.runner import Randomness

        self.model.to(self.context.device)
        self.optimizer.load_state_dict(self.optimizer.state_dict())  # moves its state to where the weights are
        self._random = Randomness(self.context.device, self._seed)
        if self._left is not None:
            self._finish_step(self._left)
            self._left = None
        self._arrange()
        self._committed = False  # True if the iteration counts as done while some of its optimizer nodes are left

    def node_names(self) -> tuple[str, ...]:
        return self._iteration.names()

    def iteration_work(self) -> float:
        return float(self._batch_size)

    def run_next_step(self) -> float:
        """Run a node; an iteration's first optimizer node returns its work: from then on it is never repeated."""
        if self.next_node == 0:
            self._begin_iteration()
        group, work = self._iteration.group(self.next_node), 0.0
        if group is None:
            self._iteration.run(self.next_node)
        else:
            if group == 0:
                work = self._commit()
            with self._offloaded.step(self.optimizer, self._groups[group]):
                step_group(self.optimizer, self._groups[group])
        self._synchronize()
        self.next_node = self._iteration.after(self.next_node)
        self._committed = self._committed and self.next_node > 0
        return work

    def state_dict(self) -> dict[str, Any]:
        """The state at the beginning of this iteration; between optimizer nodes, with the gradients not yet used."""
        buffers = self._buffers if self.next_node > 0 and not self._committed else {}
        state: dict[str, Any] = {
            "model": {k: on_cpu(buffers.get(k, v)) for k, v in self.model.state_dict().items()},
            "optimizer": on_cpu(self.optimizer.state_dict()),
            **self._course.state_dict(),
            "losses": list(self._losses),
            "result": dict(self.context.result),
        }
        if self._committed:
            named = self._slices.parameters
            state["gradients"] = {name: on_cpu(p.grad) for name, p in named if p.grad is not None}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._course.load_state_dict(state)
        self._losses = list(state["losses"])
        self._left = state.get("gradients")
        self.context.report(**state["result"])

    def _find_loss(self) -> Any:
        if self._args["loss"] is not None:
            return load_object("loss", self._args["loss"])
        if self._args["model"] in MODELS:
            return classification_loss
        if type(self).loss is TrainingJob.loss:
            raise ValueError("loss is None: expected module:function, or a subclass that overrides loss()")
        return None

    def _arrange(self) -> None:
        """Split for the current microbatch and for the rest at the end of an epoch, and list the nodes."""
        size, length = self._configuration.batch_size, self._samples.length
        self._offloaded = Offloaded(self._configuration.offload, self.context.device)
        self._offloaded.keep(self.model, self.optimizer)  # an earlier configuration may have put them elsewhere
        first, *others = (self._try(count) for count in self._sizes(size, length))
        self.split = first.how
        count = max(len(s.segments) for s in (first, *others))
        self._groups = group_parameters(self.optimizer, self._parameters, self._pieces)
        self._iteration = NodeIteration(
            self._batch_size, size, count, len(self._groups), self._begin_pass, self._checked_loss
        )
        self.next_node = 0

    def _resident(self) -> contextlib.AbstractContextManager[None]:
        return self._offloaded.weights(list(self.model.parameters()))

    def _sizes(self, size: int, length: int | None) -> list[int]:
        """The sizes of microbatches that can occur, the usual one first."""
        if length is None:
            return [size]
        rest = length % self._batch_size % size
        return ([size] if length >= size else []) + ([rest] if rest else [])

    def _try(self, count: int) -> Any:
        """Split the model for ``count`` samples, and run it forward and backward once."""
        from megatron.fill.sidetask.split.runner import Randomness, restored

        inputs, target = self._example(count)
        split = self._split_for(inputs)
        with restored(list(self.model.buffers())):
            runner = self._runner(split, Randomness(self.context.device, 0), inputs)
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
        if self._course.finished:
            raise StopIteration
        self._random.seed(self._seed, self._course.iteration + 1)
        with self._random:  # a data set may draw random numbers
            self._iteration.begin(self._course.next_batch())
        self._buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}

    def _begin_pass(self, samples: list[Any]) -> tuple[Any, Any]:
        """A runner with the inputs of a microbatch, and its target."""
        inputs, target = self._collate(samples)
        return self._runner(self._split_for(inputs, prepared=False), self._random, inputs), target

    def _runner(self, split: Any, random: Any, inputs: Any) -> Any:
        from megatron.fill.sidetask.split.runner import PieceRunner
        from megatron.fill.sidetask.split.segments import Call

        again, resident = self._configuration.checkpointing, self._offloaded.weights
        runner = PieceRunner(split, random, training=True, checkpointing=again, resident=resident)
        runner.begin(Call(inputs).leaves)
        return runner

    def _commit(self) -> float:
        """Count the iteration as done; return its work."""
        count = len(self._iteration.batch)
        self._iteration.clear()
        self._slices.take_gradients()
        self._losses.append(self._iteration.loss)
        self._committed = True
        self._course.commit(count)
        if self._course.iteration % _REPORT_EVERY == 0 or self._course.finished:
            self._report()
        return float(count)

    def _report(self) -> None:
        if self._losses:
            mean = sum(self._losses) / len(self._losses)
            self.context.report(loss=mean, epoch=self._course.epoch, iteration=self._course.iteration)
            self._losses = []

    def _finish_step(self, gradients: dict[str, Any]) -> None:
        """Do the optimizer nodes that were left when the checkpoint was written."""
        for name, parameter in self._slices.parameters:
            if name in gradients:
                parameter.grad = gradients[name].to(self.context.device)
        self.optimizer.step()
        self.optimizer.zero_grad()

"""The base of the jobs made from ordinary models: their common arguments, and the splits for each batch shape."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from typing import Any, ClassVar

from megatron.fill.errors import TaskError
from megatron.fill.profiles import Configuration
from megatron.fill.sidetask.checks import check_whole
from megatron.fill.sidetask.data import RandomData, Samples, collate, inputs_and_target, load_object
from megatron.fill.sidetask.models import MODELS, build_model
from megatron.fill.sidetask.nodes import NodeTask

_WAYS = ("auto", "sequential", "export", "whole")


class ModelJob(NodeTask):
    """A job that passes samples through a ``torch.nn.Module``, split into pieces."""

    unit: ClassVar[str] = "samples"
    _configuration: Configuration

    def build_model(self) -> Any:
        """Build the model; override it, or give ``model``: ``module:factory`` or a name of ``models.MODELS``."""
        name, args = self._args["model"], self._args["model_args"] or {}
        if isinstance(name, str) and ":" in name:
            return load_object("model", name)(**args)
        return build_model(name, **args)

    def build_data(self) -> Any:
        """Build the data set; override it, or give ``data``: ``module:factory``.  ``MODELS`` have random data."""
        name, args = self._args["model"], self._args["data_args"] or {}
        if self._args["data"] is None and name in MODELS:
            return RandomData(name, **({"size": "full"} | (self._args["model_args"] or {}) | args))
        return load_object("data", self._args["data"])(**args)

    def _prepare(self, args: dict[str, Any], seed: int, pieces: int, split: str) -> None:
        """Check the common arguments, and build model and data."""
        import torch

        check_whole(seed=(seed, 0), pieces=(pieces, 1))
        if split not in _WAYS:
            raise ValueError(f"split is {split!r}: expected one of {', '.join(_WAYS)}")
        self._args, self._seed, self._pieces, self._way = args, seed, pieces, split
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = self.build_model()
        if not isinstance(self.model, torch.nn.Module):
            raise ValueError(f"model is a {type(self.model).__name__}: expected a torch.nn.Module")
        self._samples = Samples(self.build_data())
        self._splits: dict[Any, Any] = {}

    def configure(self, configuration: Configuration) -> None:
        if configuration not in self.configurations():
            offered = ", ".join(map(str, self.configurations()))
            raise TaskError(f"configuration is {configuration}: expected one of {offered}")
        self._configuration = configuration
        if self._splits:
            self._arrange()

    @abstractmethod
    def _arrange(self) -> None:
        """Split the model for every batch shape of the current configuration, and begin an iteration."""

    def _split_for(self, inputs: Any, prepared: bool = True) -> Any:
        """The split for a batch.

        For a shape that was not prepared, the model runs as a single piece, unless its pieces fit any shape.
        """
        from megatron.fill.sidetask.split import split_model
        from megatron.fill.sidetask.split.segments import Call

        key = Call(inputs).key
        if key not in self._splits:
            first = next(iter(self._splits.values()), None)
            if first is not None and first.how.startswith("module boundaries"):
                self._splits[key] = first
            else:
                way = self._way if prepared else "whole"
                with self._resident():
                    self._splits[key] = split_model(self.model, inputs, way, self._pieces, self.context.aside)
        return self._splits[key]

    @abstractmethod
    def _resident(self) -> contextlib.AbstractContextManager[None]:
        """A context inside which all weights are on the device."""

    def _example(self, count: int) -> tuple[Any, Any]:
        """The inputs and targets of a batch of ``count`` samples to try the model with."""
        return self._collate(self._samples.first(count))

    def _collate(self, samples: list[Any]) -> tuple[Any, Any]:
        pairs = [inputs_and_target(sample) for sample in samples]
        inputs = collate([inputs for inputs, _ in pairs], self.context.device)
        targets = [target for _, target in pairs]
        return inputs, None if targets[0] is None else collate(targets, self.context.device)

    def _synchronize(self) -> None:
        """Wait for all kernels, since a step ends only when its kernels do."""
        if self.context.device != "cpu":
            import torch

            torch.cuda.synchronize(self.context.device)

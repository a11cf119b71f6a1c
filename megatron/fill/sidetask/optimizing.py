"""The optimizer's step for a few parameters at a time, and offloading to host memory between uses (needs torch)."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.fill.profiles import Offload

_ELEMENTWISE = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop")


class Slices:
    """Large parameters cut along their first dimension into views that an optimizer treats as parameters.

    For an elementwise optimizer, updating the views one after the other gives the same result as updating the whole,
    bit for bit; so the update of a word embedding need not be a single long node.  The views share the parameter's
    current storage, so they are only valid while it stays on its device.

    ``pieces`` is the number of pieces for all parameters together; a larger share of their size is cut.
    """

    def __init__(self, named: list[tuple[str, Any]], pieces: int) -> None:
        import torch

        most = max(1, sum(p.numel() for _, p in named) // pieces)
        self.parameters: list[tuple[str, Any]] = []  # in order; a view's name is ``word_embeddings.weight[0:2000]``
        self._views: list[tuple[Any, Any, int, int]] = []  # view, parameter, first and last row
        for name, parameter in named:
            count = min(-(-parameter.numel() // most), parameter.shape[0] if parameter.ndim else 1)
            if count == 1:
                self.parameters.append((name, parameter))
                continue
            bounds = [round(at * parameter.shape[0] / count) for at in range(count + 1)]
            for first, last in itertools.pairwise(bounds):
                view = torch.nn.Parameter(parameter.detach()[first:last])
                self.parameters.append((f"{name}[{first}:{last}]", view))
                self._views.append((view, parameter, first, last))

    def take_gradients(self) -> None:
        """Move the parameters' gradients to their views."""
        for view, parameter, first, last in self._views:
            view.grad = None if parameter.grad is None else parameter.grad[first:last]
        for _, parameter, _, _ in self._views:
            parameter.grad = None


def is_elementwise(optimizer: Any) -> bool:
    """True if the optimizer is known to update each element of a parameter independently."""
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim") and kind.__name__ in _ELEMENTWISE


def group_parameters(optimizer: Any, parameters: list[Any], pieces: int) -> list[list[Any]]:
    """Group the parameters into at most ``pieces`` groups of about equal size.

    Only torch's own optimizers are known to update parameters independently; for any other there is a single group.
    """
    from megatron.fill.sidetask.split.segments import even_cuts

    if not type(optimizer).__module__.startswith("torch.optim"):
        return [parameters]
    cuts = even_cuts([float(p.numel()) for p in parameters], dict.fromkeys(range(1, len(parameters)), 0.0), pieces)
    bounds = [0, *cuts, len(parameters)]
    return [parameters[a:b] for a, b in itertools.pairwise(bounds)]


def step_group(optimizer: Any, parameters: list[Any]) -> None:
    """Do an optimizer step for these parameters only, and free their gradients."""
    chosen = {id(p) for p in parameters}
    before = [group["params"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) in chosen]
        optimizer.step()
    finally:
        for group, all_of_it in zip(optimizer.param_groups, before, strict=True):
            group["params"] = all_of_it
    for parameter in parameters:
        parameter.grad = None


class Offloaded:
    """Offloading of optimizer state, and of weights with their gradients, to host memory while no node needs them.

    It has not been run: that takes a GPU.
    """

    def __init__(self, offload: Offload, device: str) -> None:
        self._offload, self._device = offload, device

    def keep(self, model: Any, optimizer: Any) -> None:
        """Move everything to its place between nodes."""
        self._move_state(optimizer, model.parameters(), "cpu" if self._offload is not Offload.NONE else self._device)
        self._move(list(model.parameters()), "cpu" if self._offload is Offload.WEIGHTS else self._device)

    @contextlib.contextmanager
    def weights(self, parameters: Sequence[Any]) -> Iterator[None]:
        """Hold these parameters on the device inside the context."""
        if self._offload is not Offload.WEIGHTS:
            yield
            return
        self._move(parameters, self._device)
        try:
            yield
        finally:
            self._move(parameters, "cpu")

    @contextlib.contextmanager
    def step(self, optimizer: Any, parameters: list[Any]) -> Iterator[None]:
        """Hold these parameters and their optimizer state on the device inside the context."""
        with self.weights(parameters):
            if self._offload is Offload.NONE:
                yield
                return
            self._move_state(optimizer, parameters, self._device)
            try:
                yield
            finally:
                self._move_state(optimizer, parameters, "cpu")

    @staticmethod
    def _move(parameters: Sequence[Any], device: str) -> None:
        for parameter in parameters:
            gradient, parameter.grad = parameter.grad, None
            parameter.data = parameter.data.to(device)
            parameter.grad = None if gradient is None else gradient.to(device)

    @staticmethod
    def _move_state(optimizer: Any, parameters: Any, device: str) -> None:
        for parameter in parameters:
            for name, value in optimizer.state.get(parameter, {}).items():
                if hasattr(value, "to") and name != "step":  # torch decides where the step count is
                    optimizer.state[parameter][name] = value.to(device)

"""Weights in host memory that are copied to the device piece by piece (PipeFill, section 4.2).

While a piece computes, the weights of the next piece are copied: on CUDA from pinned memory, on a separate stream.  So
the device holds the weights of two pieces at a time.  On the CPU the copies are the same, but do not overlap.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron.fill.sidetask.split.segments import Split


class Streamed:
    """The streamed weights of a model, as ``PieceRunner.resident`` for passes without gradients through one split.

    From construction to ``end``, a parameter's data are in host memory except while its piece runs.  Pieces run in the
    order of the split; after the last one comes the first, for the next batch.
    """

    def __init__(self, model: torch.nn.Module, split: Split, device: str) -> None:
        self._device = torch.device(device)
        cuda = self._device.type == "cuda"
        self._copies = torch.cuda.Stream(self._device) if cuda else None
        self._parameters = list(model.parameters())
        self._host: dict[torch.Tensor, torch.Tensor] = {}
        for parameter in self._parameters:
            data = parameter.detach().cpu()
            parameter.data = self._host[parameter] = data.pin_memory() if cuda else data
        self._there: dict[torch.Tensor, torch.Tensor] = {}  # copies on the device, or on their way there
        lists = [segment.parameters for segment in split.segments]
        self._next = {id(now): following for now, following in zip(lists, lists[1:] + lists[:1], strict=True)}

    @contextlib.contextmanager
    def __call__(self, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
        """Hold the parameters of a piece on the device inside the context, and start to copy those of the next."""
        self._bring(parameters)
        if self._copies is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._copies)
        for parameter in parameters:
            parameter.data = self._there[parameter]
        following = self._next.get(id(parameters), ())
        self._bring(following)
        try:
            yield
        finally:
            stays = set(following)
            for parameter in parameters:
                parameter.data = self._host[parameter]
                if parameter not in stays:
                    self._forget(parameter)

    @contextlib.contextmanager
    def all_there(self) -> Iterator[None]:
        """Hold all weights on the device inside the context."""
        self.end()
        try:
            yield
        finally:
            for parameter in self._parameters:
                parameter.data = self._host[parameter]

    def end(self) -> None:
        """Move all weights to the device permanently."""
        self._there = {}
        for parameter in self._parameters:
            parameter.data = self._host[parameter].to(self._device)

    def _bring(self, parameters: Sequence[torch.Tensor]) -> None:
        with self._copying():
            for parameter in parameters:
                if parameter not in self._there:
                    self._there[parameter] = _copied(self._host[parameter], self._device)

    def _copying(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._copies is None else torch.cuda.stream(self._copies)

    def _forget(self, parameter: torch.Tensor) -> None:
        data = self._there.pop(parameter, None)
        if data is not None and self._copies is not None:
            # Allocated on the copying stream: its memory must not be reused before the compute stream is done with it.
            data.record_stream(torch.cuda.current_stream(self._device))


def _copied(data: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_like(data, device=device).copy_(data, non_blocking=True)

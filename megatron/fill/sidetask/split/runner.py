"""The execution of a split model piece by piece, forward and backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from megatron.fill.sidetask.split.segments import Split


class Randomness:
    """A job's own state of torch's generators (the CPU's and its device's); inside ``with``, torch draws from it.

    So its random numbers depend neither on the split of the job nor on other code in the process.
    """

    def __init__(self, device: str, *seeds: int) -> None:
        self._device = torch.device(device)
        self.seed(*seeds)

    def seed(self, *seeds: int) -> None:
        """Reset the state to the seed that these numbers make together."""
        seed = int(np.random.SeedSequence(seeds).generate_state(1, np.uint64)[0]) >> 1
        devices = ["cpu"] if self._device.type == "cpu" else ["cpu", self._device]
        self.state: tuple[Any, ...] = tuple(torch.Generator(d).manual_seed(seed).get_state() for d in devices)

    def __enter__(self) -> None:
        self._outer = self._get()
        self._set(self.state)

    def __exit__(self, *exception: object) -> None:
        self.state = self._get()
        self._set(self._outer)

    def _get(self) -> tuple[Any, ...]:
        if self._device.type == "cpu":
            return (torch.get_rng_state(),)
        return (torch.get_rng_state(), torch.cuda.get_rng_state(self._device))

    def _set(self, state: tuple[Any, ...]) -> None:
        torch.set_rng_state(state[0])
        if len(state) > 1:
            torch.cuda.set_rng_state(state[1], self._device)


@dataclass(eq=False)
class PieceRunner:
    """A pass of a batch through a split model: each ``forward``, then ``loss``, then each ``backward`` in reverse.

    The gradients of parameters are accumulated in their ``.grad``.  Gradients and outputs are bit-identical to those of
    a whole pass as long as each parameter is used in one place only, since a value's gradients are summed in the same
    order as in autograd.
    """

    split: Split
    randomness: Randomness
    training: bool = False  # True to keep the tensors that a backward pass needs
    checkpointing: bool = False  # True to keep only the inputs of the pieces, and compute each again in its backward
    # A context that holds parameters on the device (offloaded weights); None if all are there.
    resident: Callable[[Sequence[torch.Tensor]], contextlib.AbstractContextManager[None]] | None = None

    def __post_init__(self) -> None:
        self._resident = self.resident or (lambda parameters: contextlib.nullcontext())
        self._dead = self.split.dead_after()
        self.clear()

    def clear(self) -> None:
        """Forget the current batch."""
        self._values: dict[int, Any] = {}
        self._kept: dict[int, Any] = {}
        self._gradients: dict[int, torch.Tensor] = {}

    def begin(self, leaves: Sequence[Any]) -> None:
        """Begin a batch with these flat inputs."""
        self.clear()
        self._values = dict(enumerate(leaves))

    def forward(self, index: int) -> None:
        segment = self.split.segments[index]
        inputs = [self._values[number] for number in segment.inputs]
        with self._resident(segment.parameters), self.randomness:
            if self.training and not self.checkpointing:
                outputs = self._run(index, inputs)
            else:
                if self.training:
                    self._kept[index] = (self.randomness.state, inputs)
                with torch.no_grad():
                    outputs = segment.run(*inputs)
        for number, output in zip(segment.outputs, outputs, strict=True):
            self._values[number] = output.detach() if isinstance(output, torch.Tensor) else output
        for number in self._dead[index]:
            del self._values[number]

    def output(self) -> Any:
        """The model's output, after the last forward."""
        return pytree.tree_unflatten([self._values[number] for number in self.split.outputs], self.split.spec)

    def loss(self, function: Callable[[Any], torch.Tensor]) -> float:
        """Compute a scalar function of the model's output, and its gradients with respect to the output."""
        ends = {n: self._values[n] for n in self.split.outputs}
        leaves = {n: _leaf(value) if n in self.split.differentiable else value for n, value in ends.items()}
        self._values = {}
        with self.randomness, torch.enable_grad():
            value = function(pytree.tree_unflatten([leaves[n] for n in self.split.outputs], self.split.spec))
            value.backward()
        self._gradients = {n: x.grad for n, x in leaves.items() if isinstance(x, torch.Tensor) and x.grad is not None}
        return float(value.detach())

    def backward(self, index: int) -> None:
        segment = self.split.segments[index]
        # The graph references the buffers, so they are restored only when it is gone.
        again = restored(segment.buffers) if self.checkpointing else contextlib.nullcontext()
        with self._resident(segment.parameters), again:
            if self.checkpointing:
                self._compute_again(index)
            leaves, entries, outputs = self._kept.pop(index)
            # The inputs are roots too, so that gradients from later pieces are summed first, as in a whole pass.
            pairs = [*zip(segment.outputs, outputs, strict=True), *zip(segment.inputs, entries, strict=True)]
            wanted = [(n, x) for n, x in pairs if n in self._gradients and x.requires_grad]
            if wanted:
                torch.autograd.backward([x for _, x in wanted], [self._gradients.pop(n) for n, _ in wanted])
        for number, leaf in leaves.items():
            if leaf.grad is not None:
                self._gradients[number] = leaf.grad

    def _run(self, index: int, inputs: list[Any]) -> tuple[Any, ...]:
        """Run a piece and keep its graph."""
        segment = self.split.segments[index]
        numbered = list(zip(segment.inputs, inputs, strict=True))
        leaves = {n: _leaf(value) for n, value in numbered if n in self.split.differentiable}
        with torch.enable_grad():
            entries = [leaves[n].view_as(leaves[n]) if n in leaves else value for n, value in numbered]
            outputs = segment.run(*entries)
        self._kept[index] = (leaves, entries, outputs)
        return outputs

    def _compute_again(self, index: int) -> None:
        """Run the piece forward once more, with the same random numbers."""
        state, inputs = self._kept.pop(index)
        now, self.randomness.state = self.randomness.state, state
        with self.randomness:
            self._run(index, inputs)
        self.randomness.state = now


@contextlib.contextmanager
def restored(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Restore the tensors' current values at the end of the context."""
    before = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                if not torch.equal(tensor, value):
                    tensor.copy_(value)


def _leaf(value: torch.Tensor) -> torch.Tensor:
    return value.detach().requires_grad_()

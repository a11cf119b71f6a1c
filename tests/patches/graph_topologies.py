"""Small graphs of modules, each stage one layer, and the gradients that one process finds for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MICROBATCHES, BATCH, LENGTH, WIDTH = 5, 2, 4, 16


@dataclass(frozen=True, slots=True)
class Topology:
    """Modules, each of some stages, and which take the output of which.

    Attributes:
        depths: per module, its stages; each has a rank of its own, in this order.
        edges: per module, those that take its output; a module of no others makes a loss.
    """

    depths: Mapping[str, int]
    edges: Mapping[str, Sequence[str]]

    @property
    def ranks(self) -> int:
        return sum(self.depths.values())

    def inputs(self, module: str) -> list[str]:
        return [name for name in self.depths if module in self.edges.get(name, ())]

    def first_rank(self, module: str) -> int:
        names = list(self.depths)
        return sum(self.depths[name] for name in names[: names.index(module)])

    def place(self, rank: int) -> tuple[str, int] | None:
        """The module and the stage of it on a rank; None for none."""
        for module, depth in self.depths.items():
            if 0 <= rank - self.first_rank(module) < depth:
                return module, rank - self.first_rank(module)
        return None


TOPOLOGIES = {
    "chain": Topology({"chain": 4}, {}),
    "chain of modules": Topology({"a": 1, "b": 2, "c": 1}, {"a": ["b"], "b": ["c"]}),
    "fan-in": Topology({"a": 1, "b": 1, "join": 1}, {"a": ["join"], "b": ["join"]}),
    "unequal fan-in": Topology({"a": 2, "b": 1, "join": 1}, {"a": ["join"], "b": ["join"]}),
    "nested fan-in": Topology(
        {"a": 1, "b": 1, "inner": 1, "c": 1, "join": 1},
        {"a": ["inner"], "b": ["inner"], "inner": ["join"], "c": ["join"]},
    ),
    "fan-out": Topology({"trunk": 1, "a": 1, "b": 1, "join": 1}, {"trunk": ["a", "b"], "a": ["join"], "b": ["join"]}),
    "two sinks": Topology({"a": 1, "b": 1, "left": 1, "right": 1}, {"a": ["left", "right"], "b": ["right"]}),
    "unequal fan-out": Topology(
        {"trunk": 1, "a": 2, "b": 1, "join": 1}, {"trunk": ["a", "b"], "a": ["join"], "b": ["join"]}
    ),
    "skip": Topology({"trunk": 1, "a": 2, "join": 1}, {"trunk": ["a", "join"], "a": ["join"]}),
}


def weights(topology: Topology, module: str, stage: int) -> torch.Tensor:
    """Those of one stage, the same in every process: a square matrix."""
    import torch

    generator = torch.Generator().manual_seed(1000 + topology.first_rank(module) + stage)
    return torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5


def data(topology: Topology, module: str, microbatch: int) -> torch.Tensor:
    """What a source takes, or a sink's targets: [sequence, batch, hidden]."""
    import torch

    generator = torch.Generator().manual_seed(10 * microbatch + topology.first_rank(module))
    return torch.randn(LENGTH, BATCH, WIDTH, generator=generator)


def stage_output(weight: torch.Tensor, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Its inputs, each weighed otherwise so that they differ in their gradients, through one layer."""
    import torch

    total = inputs[0]
    for number, tensor in enumerate(inputs[1:], 2):
        total = total + tensor * number
    return torch.tanh(total @ weight)


def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (output - targets).square().mean()


def expected(topology: Topology) -> dict[tuple[str, int], torch.Tensor]:
    """The gradients that one process finds: of the mean over micro-batches of the sinks' losses."""
    parameters = {
        (module, stage): weights(topology, module, stage).requires_grad_()
        for module, depth in topology.depths.items()
        for stage in range(depth)
    }
    for microbatch in range(MICROBATCHES):
        outputs: dict[str, torch.Tensor] = {}
        for module, depth in topology.depths.items():  # each comes after its inputs
            found = [outputs[name] for name in topology.inputs(module)] or [data(topology, module, microbatch)]
            for stage in range(depth):
                found = [stage_output(parameters[module, stage], found)]
            outputs[module] = found[0]
            if not topology.edges.get(module):
                (loss(found[0], data(topology, module, microbatch)) / MICROBATCHES).backward(retain_graph=True)
    return {place: parameter.grad for place, parameter in parameters.items() if parameter.grad is not None}

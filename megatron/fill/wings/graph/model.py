"""A model as a graph of operators with their costs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field

from megatron.fill.errors import GraphError
from megatron.fill.given.quantities import no_switch, parse_bytes

_MOST = 1e24  # of any cost: their sums over a batch stay finite
_NAME = re.compile(r"[^\s:]+")
Number = Annotated[float, BeforeValidator(no_switch), Field(ge=0, allow_inf_nan=False)]  # checked in a file
Size = Annotated[Number, BeforeValidator(lambda its: parse_bytes(its) if isinstance(its, str) else its)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """An operator; all costs but the parameters are per sample."""

    name: str
    inputs: tuple[str, ...] = ()  # names of the operators whose output it takes
    forward_flops: Number = 0.0  # floating-point operations of the forward pass
    # Floating-point operations of the backward pass; None for twice the forward pass's.
    backward_flops: Number | None = None
    # Measured seconds of the forward pass, which replace the estimate from operations and traffic.
    forward_s: Number | None = None
    backward_s: Number | None = None  # measured seconds of the backward pass; None for twice the forward pass's
    parameters: Annotated[int, BeforeValidator(no_switch), Field(ge=0)] = 0  # number of parameters
    lookup: bool = False  # True if its parameters are looked up, as in an embedding: a pass does not read all of them
    frozen: bool = False  # True if its parameters are not trained, so it has no backward pass
    moved_bytes: Size = 0.0  # memory traffic of the forward pass in addition to parameters, inputs and output
    output_bytes: Size = 0.0  # size of the output, which is sent to each stage with an operator that takes it
    kept_bytes: Size | None = None  # memory kept from the forward to the backward pass; None for the output's size
    __pydantic_config__: ClassVar = {"extra": "forbid"}  # in a file, a misspelt field is an error

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise GraphError(f"operator {self.name!r}: expected a name without spaces and colons")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not 0 <= value <= _MOST:
                raise GraphError(
                    f"operator {self.name}: {field.name} is {value}; expected a number from 0 to {_MOST:g}"
                )
        if self.backward_s is not None and self.forward_s is None:
            raise GraphError(f"operator {self.name}: has backward_s; expected forward_s beside it")
        if self.forward_s is not None and (self.forward_flops or self.backward_flops is not None):
            raise GraphError(f"operator {self.name}: has seconds and operations; expected forward_s or forward_flops")

    @property
    def kept(self) -> float:
        """Bytes per sample that are kept from the forward to the backward pass."""
        if self.frozen:
            return 0.0
        return self.output_bytes if self.kept_bytes is None else self.kept_bytes


def members(mask: int) -> Iterator[int]:
    """Yield the positions of the operators in a set, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


@dataclass(frozen=True)
class ModelGraph:
    """Operators and, by their inputs, the edges between them.

    A set of operators is an ``int`` with a bit for each, by position.

    Raises:
        GraphError: there are no operators, two have the same name, an input is unknown, there is a cycle, or a frozen
            operator takes the output of one that is trained.
    """

    name: str
    operators: tuple[Operator, ...]
    # Frozen operators outside all stages: every device holds them, and their passes run ahead, in bubbles.
    ahead: tuple[Operator, ...] = ()

    def __post_init__(self) -> None:
        if not self.operators:
            raise GraphError(f"{self.name}: has no operators; expected at least one")
        if len(self.by_name) < len(self.operators) + len(self.ahead):
            names = [operator.name for operator in (*self.operators, *self.ahead)]
            twice = next(name for name in names if names.count(name) > 1)
            raise GraphError(f"{self.name}: operator {twice} is there twice; expected different names")
        for operator in self.by_name.values():
            for name in operator.inputs:
                if name not in self.by_name:
                    raise GraphError(f"{self.name}: operator {operator.name} takes {name}, which is not an operator")
                if operator.frozen and not self.by_name[name].frozen:
                    raise GraphError(
                        f"{self.name}: operator {operator.name} is frozen and takes {name}, which is trained; expected"
                        " frozen operators before all others"
                    )
        if trained := next((operator.name for operator in self.ahead if not operator.frozen), None):
            raise GraphError(f"{self.name}: operator {trained} runs ahead; expected a frozen one")
        try:
            TopologicalSorter({its.name: its.inputs for its in self.by_name.values()}).prepare()
        except CycleError as error:
            raise GraphError(f"{self.name}: has the cycle {' -> '.join(error.args[1])}; expected none") from None

    @cached_property
    def position(self) -> dict[str, int]:
        return {operator.name: at for at, operator in enumerate(self.operators)}

    @cached_property
    def by_name(self) -> dict[str, Operator]:
        """All operators by name, including those that run ahead."""
        return {operator.name: operator for operator in (*self.operators, *self.ahead)}

    @cached_property
    def everything(self) -> int:
        return (1 << len(self.operators)) - 1

    @cached_property
    def inputs(self) -> tuple[int, ...]:
        """Per operator, the set of operators whose output it takes, without those that run ahead."""
        return tuple(self.mask(name for name in its.inputs if name in self.position) for its in self.operators)

    @cached_property
    def outputs(self) -> tuple[int, ...]:
        """Per operator, the set of operators that take its output."""
        found = [0] * len(self.operators)
        for at, inputs in enumerate(self.inputs):
            for source in members(inputs):
                found[source] |= 1 << at
        return tuple(found)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Topological order with each branch in one piece."""
        done = 0
        found: list[int] = []
        stack = [at for at in reversed(range(len(self.operators))) if not self.inputs[at]]
        while stack:
            at = stack.pop()
            found.append(at)
            done |= 1 << at
            after = [to for to in members(self.outputs[at]) if not self.inputs[to] & ~done]
            stack += reversed(after)
        return tuple(found)

    @cached_property
    def before(self) -> tuple[int, ...]:
        """Per operator, the set of all operators that it depends on."""
        found = [0] * len(self.operators)
        for at in self.order:
            for source in members(self.inputs[at]):
                found[at] |= found[source] | 1 << source
        return tuple(found)

    @cached_property
    def after(self) -> tuple[int, ...]:
        """Per operator, the set of all operators that depend on it."""
        found = [0] * len(self.operators)
        for at in reversed(self.order):
            for target in members(self.outputs[at]):
                found[at] |= found[target] | 1 << target
        return tuple(found)

    def running_ahead(self) -> ModelGraph:
        """Return a copy whose frozen operators run ahead, outside all stages; GraphError if none or all are frozen."""
        frozen = tuple(its for its in self.operators if its.frozen)
        if not frozen:
            raise GraphError(f"{self.name}: no operator is frozen; expected some to run ahead")
        if len(frozen) == len(self.operators):
            raise GraphError(f"{self.name}: all operators are frozen; expected some to train")
        trained = tuple(its for its in self.operators if not its.frozen)
        return replace(self, operators=trained, ahead=(*self.ahead, *frozen))

    def mask(self, names: Iterable[str]) -> int:
        found = 0
        for name in names:
            found |= 1 << self.position[name]
        return found

    def names(self, mask: int) -> tuple[str, ...]:
        """The names of a set's operators, each after its inputs."""
        return tuple(self.operators[at].name for at in self.order if mask >> at & 1)

"""The graph of a real model: its operators as ``torch.export`` traces them, small ones merged.

torch is imported when a model is traced, and not before.
"""

from __future__ import annotations

import os
import pkgutil
import sys
from collections.abc import Iterator
from typing import Any

from megatron.fill.errors import GraphError
from megatron.fill.wings.graph.model import ModelGraph, Operator, members
from megatron.fill.wings.graph.tree import Chain, decompose, item_operators

_SMALL = 1 / 64  # share of the model's work below which an operator is merged with its neighbour
_EXPECTED = "expected a function that returns a module and its inputs, a tuple of tensors"


def export_model(path: str) -> ModelGraph:
    """Trace the module and inputs that ``module:function`` returns; the inputs' first dimension is the samples.

    Operations are counted for products of matrices and convolutions; all else takes the time of its memory traffic.
    Neighbours are put together up to a 64th of the model's work.  Shared parameters count with the first one.

    Raises:
        GraphError: there is no such function, it returns something else, it fails, or the model cannot be traced.
    """
    module, inputs, samples = _given(path)
    import torch

    try:
        with torch.no_grad():
            program = torch.export.export(module, inputs, strict=False).run_decompositions()
    except Exception as error:  # tracing runs the user's code, and fails in its own ways
        reason = (str(error).strip() or "no reason given").splitlines()[0][:200]
        raise GraphError(f"{path}: torch.export failed: {type(error).__name__}: {reason}") from error
    parts = _operators(program, samples)
    if not parts:
        raise GraphError(f"{path}: the model has no operations; expected some")
    return coarsen(ModelGraph(path.replace(":", "."), tuple(parts)), _SMALL)


def _given(path: str) -> tuple[Any, tuple[Any, ...], int]:
    sys.path.insert(0, os.getcwd())
    try:
        returned = pkgutil.resolve_name(path)()
    except Exception as error:
        raise GraphError(f"{path}: {type(error).__name__}: {error}; {_EXPECTED}") from error
    finally:
        sys.path.remove(os.getcwd())
    import torch

    if not (isinstance(returned, tuple) and len(returned) == 2):
        raise GraphError(f"{path}: returned something of type {type(returned).__name__}; {_EXPECTED}")
    module, inputs = returned
    tensors = isinstance(inputs, tuple) and all(isinstance(tensor, torch.Tensor) and tensor.dim() for tensor in inputs)
    if not (isinstance(module, torch.nn.Module) and tensors and inputs):
        raise GraphError(f"{path}: returned something else; {_EXPECTED}")
    samples = {tensor.shape[0] for tensor in inputs}
    if len(samples) > 1 or 0 in samples:
        raise GraphError(f"{path}: the inputs have first dimensions {sorted(samples)}; expected the same, the samples")
    return module, inputs, samples.pop()


def _operators(program: Any, samples: int) -> list[Operator]:
    """Return an operator per operation; operations on parameters alone are part of those that use their results."""
    import torch
    from torch.utils.flop_counter import flop_registry

    signature = program.graph_signature
    held = signature.inputs_to_parameters | signature.inputs_to_buffers
    weights: dict[Any, dict[str, int]] = {}  # node -> the parameters that it is, or is made of
    names: dict[Any, str] = {}  # node -> the operator that makes its value
    found: dict[Any, Operator] = {}
    counted: set[str] = set()
    for node in program.graph.nodes:
        if node.op == "placeholder":
            is_parameter = node.name in signature.inputs_to_parameters
            if node.name in held:
                weights[node] = {held[node.name]: node.meta["val"].numel()} if is_parameter else {}
            continue
        if node.op != "call_function":
            continue
        taken = [source for source in node.all_input_nodes if source in weights]
        others = [source for source in node.all_input_nodes if source not in weights]
        parameters = {name: size for source in taken for name, size in weights[source].items()}
        if taken and not others:
            weights[node] = parameters
            continue
        if len(others) == 1 and _is_view(node.target):
            names[node] = names.get(others[0], "")
            continue
        values = [value for value in _flat(node.meta.get("val")) if isinstance(value, torch.Tensor)]
        size = sum(value.numel() * value.element_size() for value in values) / samples
        count = flop_registry.get(getattr(node.target, "overloadpacket", None))
        arguments = [_value(argument) for argument in node.args]
        flops = count(*arguments, **node.kwargs, out_val=node.meta["val"]) / samples if count else 0.0
        names[node] = _name(node)
        inputs = dict.fromkeys(names.get(source, "") for source in others)  # the model's own have no name
        found[node] = Operator(
            name=names[node],
            inputs=tuple(name for name in inputs if name),
            forward_flops=flops,
            parameters=sum(size for name, size in parameters.items() if name not in counted),
            output_bytes=size,
        )
        counted |= set(parameters)
    return list(found.values())


def _name(node: Any) -> str:
    stack = list((node.meta.get("nn_module_stack") or {"": ("", None)}).values())
    path = str(stack[-1][0])
    return f"{path}/{node.name}" if path else str(node.name)


def _is_view(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)


def _flat(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple | list) else [value]


def _value(argument: Any) -> Any:
    if isinstance(argument, tuple | list):
        return type(argument)(_value(entry) for entry in argument)
    return argument.meta["val"] if hasattr(argument, "meta") else argument


def coarsen(graph: ModelGraph, share: float) -> ModelGraph:
    """Merge neighbours in series, and whole blocks of branches, up to ``share`` of the model's work per operator.

    An operator's work is its floating-point operations plus its bytes of output.  A merged operator has the name of its
    largest member.
    """
    weights = [its.forward_flops + its.output_bytes for its in graph.operators]
    most = share * sum(weights)

    def weight(mask: int) -> float:
        return sum(weights[at] for at in members(mask))

    def groups(chain: Chain) -> Iterator[int]:
        grown = 0
        for item in chain:
            mask = item_operators(item)
            if grown and weight(grown | mask) <= most:
                grown |= mask
                continue
            if grown:
                yield grown
            grown = 0
            if isinstance(item, int) or weight(mask) <= most:
                grown = mask
            else:
                for branch in item:
                    yield from groups(branch)
        if grown:
            yield grown

    chain, _ = decompose(graph)
    masks = list(groups(chain))
    names = [graph.operators[max(members(mask), key=lambda at: weights[at])].name for mask in masks]
    home = {at: name for mask, name in zip(masks, names, strict=True) for at in members(mask)}
    return ModelGraph(
        graph.name, tuple(_together(graph, mask, name, home) for mask, name in zip(masks, names, strict=True))
    )


def _together(graph: ModelGraph, mask: int, name: str, home: dict[int, str]) -> Operator:
    its = [graph.operators[at] for at in members(mask)]
    inputs = {home[source] for at in members(mask) for source in members(graph.inputs[at] & ~mask)}
    inside = sum(graph.operators[at].output_bytes for at in members(mask) if not graph.outputs[at] & ~mask)
    output = sum(graph.operators[at].output_bytes for at in members(mask) if graph.outputs[at] & ~mask)
    return Operator(
        name=name,
        inputs=tuple(sorted(inputs)),
        forward_flops=sum(one.forward_flops for one in its),
        parameters=sum(one.parameters for one in its),
        moved_bytes=sum(one.moved_bytes for one in its) + 2 * inside,  # written, and read again
        output_bytes=output,
        kept_bytes=sum(one.kept for one in its),
    )

"""Splitting any model that ``torch.export`` can trace, by cutting its graph into pieces of about equal cost."""

from __future__ import annotations

import itertools
import operator
from typing import Any

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from megatron.fill.sidetask.split.segments import Call, ModelSegment, Split, SplitError, cost_ns, even_cuts, nbytes

_MAY_SHARE = ("aten::reshape", "aten::contiguous", "aten::to", "aten::flatten", "aten::dropout")


class _Flat(nn.Module):
    """The model with flat lists of tensors as inputs and outputs."""

    def __init__(self, model: nn.Module, call: Call) -> None:
        super().__init__()
        self.model = model
        self.call = call

    def forward(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        given = iter(tensors)
        leaves = [next(given) if isinstance(x, torch.Tensor) else x for x in self.call.leaves]
        return tuple(pytree.tree_leaves(self.call(self.model, leaves)))


def split_export(model: nn.Module, call: Call, pieces: int, spec: Any) -> Split:
    """Trace the model for inputs of exactly these shapes and cut its graph.

    The pieces use the model's own parameters and buffers.  ``spec`` is the structure of its output.  SplitError if the
    model cannot be traced, or its graph cannot be cut.
    """
    flat = _Flat(model, call)
    flat.train(model.training)
    tensors = tuple(x for x in call.leaves if isinstance(x, torch.Tensor))
    try:
        program = torch.export.export(flat, tensors)
    except Exception as error:  # tracing runs the user's code, which may raise anything
        reason = (str(error).strip() or "no reason given").splitlines()[0][:200]
        raise SplitError(f"torch.export failed: {type(error).__name__}: {reason}") from error
    signature = program.graph_signature
    if any(s.kind is not OutputKind.USER_OUTPUT for s in signature.output_specs):
        raise SplitError("torch.export made a graph that returns more than the model does")
    state: dict[str, torch.Tensor] = {}
    inputs: list[str] = []
    for entry in signature.input_specs:
        if entry.kind is InputKind.USER_INPUT:
            inputs.append(entry.arg.name)
        elif entry.kind is InputKind.PARAMETER and entry.target is not None:
            state[entry.arg.name] = flat.get_parameter(entry.target)
        elif entry.kind is InputKind.BUFFER and entry.target is not None:
            state[entry.arg.name] = flat.get_buffer(entry.target)
        elif entry.kind is InputKind.CONSTANT_TENSOR and entry.target is not None:
            state[entry.arg.name] = program.constants[entry.target]
        else:
            raise SplitError(f"torch.export made an input of kind {entry.kind.name}")
    _write_elsewhere(program.graph)
    return _Cutter(program, state, inputs, call).split(pieces, spec)


def _write_elsewhere(graph: fx.Graph) -> None:
    """Replace in-place operations by versions that return a new tensor, if nothing reads the old one later."""
    order = {node: at for at, node in enumerate(graph.nodes)}
    roots = _roots(graph)
    for node in graph.nodes:
        target = _written(node)
        if target is None or target.op == "placeholder" or node.args[0] is not target:
            continue
        name = node.target._schema.name.split("::")[1]
        packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
        if packet is None or node.target._overloadname not in packet.overloads():
            continue
        same = [other for other, root in roots.items() if root is roots[target] and other is not node]
        made_before = [other for other in same if order[other] < order[node]]
        read_later = any(order[user] > order[node] for other in made_before for user in other.users)
        base = roots[target]
        if not read_later and base.op != "placeholder" and node.meta["val"].dtype == target.meta["val"].dtype:
            node.target = getattr(packet, node.target._overloadname)
    graph.lint()


def _written(node: fx.Node) -> fx.Node | None:
    """The tensor that an operation writes into; None if it writes into none."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    for index, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            return value if isinstance(value, fx.Node) else None
    return None


def _roots(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For each node, the node whose memory it may share, or itself."""
    roots: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        source = None
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            schema = node.target._schema
            # Those in _MAY_SHARE return their input itself if there is nothing to do, which their schemas do not show.
            shares = any(r.alias_info is not None for r in schema.returns) or schema.name in _MAY_SHARE
            source = next((a for a in node.args if isinstance(a, fx.Node)), None) if shares else None
        elif node.target is operator.getitem:
            source = node.args[0]
        roots[node] = roots[source] if isinstance(source, fx.Node) else node
    return roots


class _Cutter:
    def __init__(self, program: Any, state: dict[str, torch.Tensor], inputs: list[str], call: Call) -> None:
        self.module: fx.GraphModule = program.graph_module
        self.state = state
        nodes = list(program.graph.nodes)
        self.body = [n for n in nodes if n.op == "call_function"]
        self.attributes = {n for n in nodes if n.op == "get_attr"}
        by_name = {n.name: n for n in nodes}
        # Numbers of the values: the flat inputs come first, tensors or not.
        positions = [i for i, x in enumerate(call.leaves) if isinstance(x, torch.Tensor)]
        self.numbers = {by_name[name]: at for name, at in zip(inputs, positions, strict=True)}
        self.next_number = len(call.leaves)
        self.results = list(nodes[-1].args[0])
        if not all(isinstance(result, fx.Node) for result in self.results):
            raise SplitError("the model returns values that are not tensors")
        self.device = next((x.device.type for x in call.leaves if isinstance(x, torch.Tensor)), "cpu")

    def split(self, pieces: int, spec: Any) -> Split:
        if not self.body:
            raise SplitError("the graph is empty")
        bounds = [0, *even_cuts(self._costs(), self._allowed(), pieces), len(self.body)]
        segments = tuple(self._segment(self.body[a:b]) for a, b in itertools.pairwise(bounds))
        outputs = tuple(self.numbers[node] for node in self.results)
        return Split(f"torch.export, {len(segments)} pieces", segments, outputs, spec)

    def _costs(self) -> list[float]:
        costs = []
        for node in self.body:
            flops = 0
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
            if isinstance(node.target, torch._ops.OpOverload) and _is_heavy(node):
                with FlopCounterMode(display=False) as meter:
                    node.target(*args, **kwargs)
                flops = meter.get_total_flops()
            view = isinstance(node.target, torch._ops.OpOverload) and node.target.is_view
            moved = 0 if view or node.target is operator.getitem else nbytes((args, kwargs, node.meta.get("val")))
            costs.append(cost_ns(flops, moved, self.device))
        return costs

    def _allowed(self) -> dict[int, float]:
        """The places where a cut is allowed, each with the bytes of the values that cross it."""
        order = {node: at for at, node in enumerate(self.body)}
        end = len(self.body)
        last = {n: max((order.get(user, end) for user in n.users), default=order[n]) for n in self.body}
        allowed: dict[int, float] = {}
        barred = self._barred(order, last)
        crossing: list[fx.Node] = []
        for at in range(1, end):
            crossing = [n for n in (*crossing, self.body[at - 1]) if last[n] >= at]
            if at not in barred and all(isinstance(n.meta.get("val"), torch.Tensor) for n in crossing):
                allowed[at] = float(nbytes([n.meta["val"] for n in crossing]))
        return allowed

    def _barred(self, order: dict[fx.Node, int], last: dict[fx.Node, int]) -> set[int]:
        """The places where a cut is forbidden: from the creation to the last use of a tensor that is written into."""
        roots = _roots(self.module.graph)
        barred: set[int] = set()
        for written in filter(None, map(_written, self.body)):
            family = [n for n in self.body if roots[n] is roots[written]]
            if roots[written].op == "placeholder":
                if roots[written].name not in self.state:
                    raise SplitError(f"the model writes into its input {roots[written].name}")
                continue
            barred.update(range(min(order[n] for n in family) + 1, max(last[n] for n in family) + 1))
        return barred

    def _segment(self, nodes: list[fx.Node]) -> ModelSegment:
        graph = fx.Graph()
        inside = set(nodes)
        needed = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside)
        values = [n for n in needed if n in self.numbers]
        state = [n for n in needed if n.name in self.state]
        copies: dict[fx.Node, fx.Node] = {n: graph.placeholder(n.name) for n in (*values, *state)}
        for node in needed:
            if node in self.attributes:
                copies[node] = graph.node_copy(node)
        for node in nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        outputs = [n for n in nodes if any(user not in inside for user in n.users)]
        graph.output(tuple(copies[n] for n in outputs))
        for node in outputs:
            self.numbers[node] = self.next_number
            self.next_number += 1
        tensors = tuple(self.state[n.name] for n in state)
        module = fx.GraphModule(self.module, graph)
        return ModelSegment(
            lambda *values: module(*values, *tensors),
            tuple(self.numbers[n] for n in values),
            tuple(self.numbers[n] for n in outputs),
            tuple(t for t in tensors if isinstance(t, nn.Parameter)),
            tuple(t for t in tensors if not isinstance(t, nn.Parameter)),
        )


def _is_heavy(node: fx.Node) -> bool:
    """True if floating-point operations, rather than bytes, may dominate the node's time."""
    name = node.target._schema.name
    return any(word in name for word in ("mm", "linear", "matmul", "conv", "attention", "einsum", "lstm", "gru"))

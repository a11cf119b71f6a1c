"""Multi-module pipelines whose modules are a graph: warm-up, fan-out, and branches of unequal length.

Megatron's schedule of such a pipeline is 1F1B on every rank.  For a graph, three things have to be corrected.

- The warm-up has as many forward passes as there are stages after this one.  Upstream counts them from the source: all
  stages minus those up to here.  On a branch shorter than another that is too many, and all ranks wait for each other.
  Here the stages up to the farthest sink are counted.
- If a module's output goes to several others, their gradients have to be added up.  Upstream keeps the last one.
- A rank sends an activation and receives a gradient in one call, and its peer does the reverse in one call.  The calls
  match if the sender has exactly one forward pass more in its warm-up than the receiver.  If it has more, since another
  of its branches is longer, the receiver receives the additional activations ahead of time.

A program that trains a graph and calls the schedule without a communicator, as ``pretrain`` does, sets it with ``use``.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron.fill.hooks import bus
from pipefill_patches.patch import Call, Patch, Target, around, replace, wrap
from pipefill_patches.schedules import PLAIN, spanned

_PIPELINE = "megatron.core.pipeline_parallel.multimodule_communicator:MultiModulePipelineCommunicator"
_STAGE = Target(f"{_PIPELINE}.current_stage", ("self",), ("total_stages",))
_TOTAL = Target(f"{_PIPELINE}.total_stages", ("self",))
_BUILD = Target(f"{_PIPELINE}._build_rank_module_info_map", ("self",), ("rank_module_map", "bridge_comms"))
_OUT = Target(f"{_PIPELINE}.send_forward_recv_backward", ("self",), ("bridge_comms_as_src_module",))
_IN = Target(f"{_PIPELINE}.send_backward_recv_forward", ("self",), ("bridge_comms_as_dest_module",))
_SCHEDULE = Target(PLAIN.path, PLAIN.parameters, ("total_stages", "current_stage", "backward_step_multimodule"))
_BACKWARD = Target(
    "megatron.core.pipeline_parallel.schedules:backward_step_multimodule",
    ("input_tensor", "output_tensor", "output_tensor_grad", "config"),
)


_used: dict[str, Any] = {}


def use(**pipeline: Any) -> None:
    """Give the schedule these arguments from now on, whenever it is called without a communicator and groups.

    They are ``p2p_communicator``, a ``MultiModulePipelineCommunicator``, and ``pg_collection``, a
    ``MultiModuleProcessGroupCollection``; none of them to change nothing any more.
    """
    _used.clear()
    _used.update(pipeline)


def stages_after(topology: Mapping[str, Sequence[str]], depths: Mapping[str, int], module: str) -> int:
    """Return the number of stages on the longest path from a module's end to a sink.

    Args:
        topology: the modules that take a module's output, by module; without a cycle.
        depths: number of pipeline stages, by module.
    """
    return max((depths[to] + stages_after(topology, depths, to) for to in topology.get(module, ())), default=0)


def _depths(communicator: Any) -> dict[str, int]:
    return {name: grid.shape[grid.dim_names.index("pp")] for name, grid in communicator.module_to_grid_map.items()}


def _current_stage(self: Any) -> int:
    """Return the rank's stage for the schedule: the total minus 1 minus the stages after it up to the farthest sink.

    A rank without a module gets the last stage.
    """
    depths = _depths(self)
    after = (
        stages_after(self.topology, depths, name) + its.pp_size - its.pp_rank - 1
        for name, its in self.rank_module_map.items()
    )
    return int(self.total_stages - 1 - max(after, default=0))


class FanOut:
    """Several modules' bridges as one: the output is sent to each, and their gradients are added up."""

    def __init__(self, bridges: Sequence[Any]) -> None:
        self.bridges = tuple(bridges)
        self.src_module_name = bridges[0].src_module_name

    def send_forward(self, tensor: Any) -> None:
        for bridge in self.bridges:
            bridge.send_forward(tensor)

    def recv_backward(self) -> Any:
        return _added([bridge.recv_backward() for bridge in self.bridges])

    def send_forward_recv_backward(self, tensor: Any) -> Any:
        return _added([bridge.send_forward_recv_backward(tensor) for bridge in self.bridges])


def _added(gradients: list[Any]) -> Any:
    return sum(gradients[1:], gradients[0])


class FanIn:
    """The bridges of a module's inputs; some inputs are received ahead of time, so that both sides' calls match.

    Due inputs are received round-robin, one from each bridge, so that a slow sender does not block another one.

    Args:
        ahead: bridges, each with the number of forward passes that its sender's warm-up is longer than expected.
    """

    def __init__(self, ahead: Sequence[tuple[Any, int]]) -> None:
        self.microbatches = 0
        self.inlets = [Inlet(self, bridge, by) for bridge, by in ahead]

    def begin(self, microbatches: int) -> None:
        """Begin a schedule with this number of forward passes."""
        self.microbatches = microbatches
        for inlet in self.inlets:
            inlet.clear()

    def receive(self) -> None:
        """Receive all inputs that are due before the next forward pass."""
        while late := [inlet for inlet in self.inlets if inlet.lacks]:
            for inlet in late:
                inlet.receive()


class Inlet:
    """A bridge of a ``FanIn``, with the methods that the communicator calls."""

    def __init__(self, fan: FanIn, bridge: Any, ahead: int) -> None:
        self.fan = fan
        self.bridge = bridge
        self.src_module_name = bridge.src_module_name
        self._ahead = ahead
        self.clear()

    def clear(self) -> None:
        self._kept: deque[Any] = deque()
        self._given = 0

    @property
    def lacks(self) -> bool:
        """True if an input has to be received before the next one is returned."""
        return self._given + len(self._kept) < min(self.fan.microbatches, self._given + 1 + self._ahead)

    def receive(self) -> None:
        self._kept.append(self.bridge.recv_forward())

    def recv_forward(self) -> Any:
        if self.lacks:
            self.fan.receive()  # the first inlet receives for all
        return self._give()

    def send_backward(self, gradient: Any) -> None:
        self.bridge.send_backward(gradient)

    def send_backward_recv_forward(self, gradient: Any) -> Any:
        if self.lacks:
            self._kept.append(self.bridge.send_backward_recv_forward(gradient))
        else:  # the sender has no more to send
            self.bridge.send_backward(gradient)
        return self._give()

    def _give(self) -> Any:
        self._given += 1
        return self._kept.popleft()


def _joined(build: Callable[[Any], None], communicator: Any) -> None:
    build(communicator)
    depths = _depths(communicator)
    after = {name: stages_after(communicator.topology, depths, name) for name in depths}
    for module, its in communicator.rank_module_map.items():
        out, into = its.bridge_comms_as_src_module, its.bridge_comms_as_dest_module
        if len(out) > 1:
            near = sorted(out, key=lambda bridge: -after[bridge.dest_module_name] - depths[bridge.dest_module_name])
            its.bridge_comms_as_src_module = [FanOut(near)]
        begins = after[module] + depths[module]
        ahead = sorted(((bridge, after[bridge.src_module_name] - begins) for bridge in into), key=lambda one: one[1])
        if any(by for _, by in ahead):
            its.bridge_comms_as_dest_module = FanIn(ahead).inlets


def _with_pipeline(schedule: Call, /, **kwargs: Any) -> Any:
    if kwargs.get("p2p_communicator") is None and kwargs.get("pg_collection") is None:
        kwargs |= _used
    for its in getattr(kwargs.get("p2p_communicator"), "rank_module_map", {}).values():
        for bridge in its.bridge_comms_as_dest_module[:1]:
            if isinstance(bridge, Inlet):
                bridge.fan.begin(kwargs["num_microbatches"])
    return schedule(**kwargs)


def _install(stack: contextlib.ExitStack) -> None:
    owner, name = _STAGE.resolve()
    replace(stack, owner, name, property(_current_stage))
    around(stack, *_BUILD.resolve(), _joined)
    around(stack, *_SCHEDULE.resolve(), _with_pipeline)
    wrap(stack, *_BACKWARD.resolve(), spanned, bus.backward)
    stack.callback(use)


PATCH = Patch("multimodule", _install, (_STAGE, _TOTAL, _BUILD, _OUT, _IN, _SCHEDULE, _BACKWARD))

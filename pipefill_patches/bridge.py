"""Bridges between the modules of a multi-module pipeline: the process groups' backend, and bubbles around their waits.

A ``BridgeCommunicator`` carries activations and gradients from one module to the next.  It posts its transfers and
waits for them itself, without ``P2PCommunicator``: the bridge is a second seam.  In each of its methods the first wait
is the one for shapes (for a rank that receives everything from its leader, the whole call is a wait): there the bubble
opens.  It closes with the outermost call, since a module with several inputs or outputs goes from bridge to bridge and
computes nothing in between.

Upstream creates these groups with ``nccl`` by name.  Without a name a group gets the world's backend, which is ``nccl``
on a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from typing import Any

from megatron.fill.hooks import bus
from pipefill_patches.patch import Call, Patch, Target, around, replace

_MODULE = "megatron.core.pipeline_parallel.bridge_communicator"
_BRIDGE = f"{_MODULE}:BridgeCommunicator"
_PIPELINE = "megatron.core.pipeline_parallel.multimodule_communicator:MultiModulePipelineCommunicator"
_SHAPES = Target(
    f"{_BRIDGE}._communicate_shapes", ("self", "tensor_to_send_next", "recv_next", "recv_prev", "tensor_to_send_prev")
)
_GROUPS = (
    Target(f"{_BRIDGE}._get_or_create_broadcast_pg", ("ranks_list",), ("dist", "_broadcast_pg_cache")),
    Target(f"{_BRIDGE}._get_or_create_bridge_pg", ("ranks",), ("dist", "_bridge_pg_cache")),
)
# The methods that a schedule calls of a bridge and of the pipeline's communicator; True for those that wait for a
# gradient.
_CALLS = {
    "recv_forward": False,
    "send_forward": False,
    "recv_backward": True,
    "send_backward": False,
    "send_forward_recv_backward": True,
    "send_backward_recv_forward": False,
}
_OWN = {"recv_forward": (), "recv_backward": (), "send_forward": ("tensor_to_send",), "send_backward": ("grad_tensor",)}
_BRIDGE_CALLS = tuple(Target(f"{_BRIDGE}.{name}", ("self", *_OWN.get(name, ()))) for name in _CALLS)
_PIPELINE_CALLS = tuple(Target(f"{_PIPELINE}.{name}", ("self",)) for name in _CALLS)


class _Call:
    """The outermost call in progress."""

    depth = 0
    for_backward = False


_call = _Call()


def _outermost(original: Call, for_backward: bool, bridge: bool, this: Any, /, *args: Any, **kwargs: Any) -> Any:
    if not _call.depth:
        _call.for_backward = for_backward
    if bridge and this.comm_map[this.current_rank].role.value == "MEMBER":
        bus.open(for_backward=_call.for_backward)  # it exchanges no shapes: its leader broadcasts everything
    _call.depth += 1
    try:
        return original(this, *args, **kwargs)
    finally:
        _call.depth -= 1
        if not _call.depth:
            bus.close()


def _opening(original: Call, /, *args: Any, **kwargs: Any) -> Any:
    return bus.wait(functools.partial(original, *args, **kwargs), for_backward=_call.for_backward)


class _OfTheWorld:
    """``torch.distributed``, except that groups get the world's backend instead of a named one."""

    def __init__(self, distributed: Any) -> None:
        self._distributed = distributed

    def new_group(self, ranks: list[int], **_: Any) -> Any:
        return self._distributed.new_group(ranks)

    def new_subgroups_by_enumeration(self, ranks_per_subgroup_list: list[list[int]], **_: Any) -> Any:
        return self._distributed.new_subgroups_by_enumeration(ranks_per_subgroup_list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._distributed, name)


def _install(stack: contextlib.ExitStack) -> None:
    module = importlib.import_module(_MODULE)
    replace(stack, module, "dist", _OfTheWorld(module.dist))
    around(stack, *_SHAPES.resolve(), _opening)
    for targets, bridge in ((_BRIDGE_CALLS, True), (_PIPELINE_CALLS, False)):
        for target in targets:
            owner, name = target.resolve()
            around(stack, owner, name, _outermost, _CALLS[name], bridge)


PATCH = Patch("bridge", _install, (_SHAPES, *_GROUPS, *_BRIDGE_CALLS, *_PIPELINE_CALLS))

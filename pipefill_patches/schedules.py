"""Schedule boundaries, compute spans, and the GPipe schedule.

The schedule functions look up each other and the pass functions as module globals at each call, so replacing these
globals reaches every caller, even through copies of ``get_forward_backward_func`` that other modules imported.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
from collections.abc import Callable
from typing import Any

from megatron.fill.account import HOST
from megatron.fill.errors import PatchError
from megatron.fill.hooks import bus
from megatron.fill.types import CycleKey
from pipefill_patches.patch import Call, Patch, Target, around, wrap

_MODULE = "megatron.core.pipeline_parallel.schedules"
_KEYWORDS = ("forward_step_func", "data_iterator", "model", "num_microbatches")
PLAIN = Target(f"{_MODULE}:forward_backward_pipelining_without_interleaving", _KEYWORDS)
_INTERLEAVED = Target(f"{_MODULE}:forward_backward_pipelining_with_interleaving", _KEYWORDS)
FORWARD = Target(f"{_MODULE}:forward_step", _KEYWORDS)
BACKWARD = Target(f"{_MODULE}:backward_step", ("input_tensor", "output_tensor", "output_tensor_grad", "config"))
_COMBINED = Target(f"{_MODULE}:combined_1f1b_schedule_for_interleaved_pipelining", ("config", *_KEYWORDS))
_DEPTH = Target(PLAIN.path, PLAIN.parameters, uses=("P2PCommunicator", "total_stages"))
_COMMUNICATOR = Target(f"{_MODULE}:P2PCommunicator.__init__", ("self", "pp_group", "config"))


def _bracketed(original: Call, schedule: str, /, **kwargs: Any) -> Any:
    from megatron.core.utils import get_model_config

    model = kwargs["model"]
    chunks = len(model) if isinstance(model, list) else 1
    name = "graph" if hasattr(kwargs.get("p2p_communicator"), "rank_module_map") else schedule
    group = get_model_config(model[0]).microbatch_group_size_per_vp_stage if chunks > 1 else 0
    bus.begin_schedule(CycleKey(name, kwargs["num_microbatches"], chunks, kwargs.get("forward_only", False), group))
    depth = bus.account.enter(bus.computing(HOST))
    try:
        return original(**kwargs)
    finally:
        bus.account.leave(depth)
        bus.end_schedule()


def spanned(original: Call, report: Callable[[int], None]) -> Call:
    """Wrap a pass; after it has ended, ``report`` (of the bus) is called with the time of its start."""
    account = bus.account

    def run(*args: Any, **kwargs: Any) -> Any:
        start_ns = time.monotonic_ns()
        depth = account.enter(bus.computing(report.__name__))
        bus.in_pass += 1
        try:
            result = original(*args, **kwargs)
        finally:
            bus.in_pass -= 1
            account.leave(depth)
        report(start_ns)
        return result

    return run


def _combined(original: Call, /, *args: Any, **kwargs: Any) -> Any:
    """Run a combined forward and backward (``--overlap-moe-expert-parallel-comm``); a call may have only one."""
    start_ns = time.monotonic_ns()
    backward = kwargs.get("b_virtual_microbatch_id") is not None
    bus.in_pass += 1
    try:
        with bus.account.within(bus.computing("backward" if backward else "forward")):
            result = original(*args, **kwargs)
    finally:
        bus.in_pass -= 1
    if kwargs.get("f_virtual_microbatch_id") is not None:
        bus.forward(start_ns)
    if backward:
        bus.backward(start_ns)
    return result


def _install(stack: contextlib.ExitStack) -> None:
    around(stack, *PLAIN.resolve(), _bracketed, "1f1b")
    around(stack, *_INTERLEAVED.resolve(), _bracketed, "interleaved")
    wrap(stack, *FORWARD.resolve(), spanned, bus.forward)
    wrap(stack, *BACKWARD.resolve(), spanned, bus.backward)
    around(stack, *_COMBINED.resolve(), _combined)


PATCH = Patch("schedules", _install, (PLAIN, _INTERLEAVED, FORWARD, BACKWARD, _COMBINED))


def _gpipe(schedule: Call, /, **kwargs: Any) -> Any:
    if kwargs.get("p2p_communicator") is not None or kwargs.get("pg_collection") is not None:
        raise PatchError("--fill-pipeline-schedule gpipe does not support multi-module pipelines")
    # The schedule creates its communicator itself, from the class with this name, and the process groups too.
    module, _ = PLAIN.resolve()
    communicator_class = module.P2PCommunicator
    module.P2PCommunicator = _all_forwards_first(communicator_class, kwargs["num_microbatches"])
    try:
        return _bracketed(inspect.unwrap(schedule), "gpipe", **kwargs)
    finally:
        module.P2PCommunicator = communicator_class


@functools.cache
def _all_forwards_first(base: type, microbatches: int) -> type:
    """Return a communicator class that reports a pipeline so deep that 1F1B's warm-up has every forward.

    1F1B with as many warm-up forwards as microbatches is GPipe: all forwards, then all backwards.  The backwards keep
    1F1B's order, so gradients are summed in the same order and the losses are bit-identical.
    """

    def total_stages(self: Any) -> int:
        return self.current_stage + 1 + microbatches

    return type("AllForwardsFirst", (base,), {"total_stages": property(total_stages)})


GPIPE_PATCH = Patch("gpipe", lambda stack: around(stack, *PLAIN.resolve(), _gpipe), (_DEPTH, _COMMUNICATOR))

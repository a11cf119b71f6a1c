"""Bubbles around all collectives that wait for other stages.

The drain bubble is not in a pipeline transfer: after its last backward a rank waits in the first collective that spans
stages (tied embeddings' gradients, the gradient norm, a barrier before a timer).  Ranks also wait so between passes, as
in the barrier with which ``--timing-log-level 1`` begins a schedule.

All functions of ``torch.distributed`` end, also if imported, in methods of two classes, ``ProcessGroup`` and ``Work``.
So these methods are wrapped: a blocking call is a bubble from before it is posted, and an asynchronous one is a bubble
during its ``wait``.  A send or receive between passes is to another stage, whatever its group: a bridge between the
modules of a pipeline has a group that no stage knows.

Collectives inside a pass or within one stage (data or tensor parallel) open no pipeline bubble; the account of the
rank's time has them under the name of their group.  Two sorts of them are bubbles of kinds of their own: ``SAVE`` for
those in a checkpoint's save, where a rank waits for the others to have written, and ``GROUP`` for those within a stage
between an iteration's passes.  Functional collectives, which torch dispatches in C++, are not intercepted.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from threading import get_ident
from typing import Any
from weakref import ref

from megatron.fill.hooks import bus
from pipefill_patches.patch import Call, definers, wrap

_ALWAYS = ("allreduce", "broadcast", "barrier")
# The names in all versions of torch.
_CALLS = (
    *("_allgather_base", "_end_coalescing", "_reduce_scatter_base", "all_gather_single", "all_gather_single_coalesced"),
    *("all_to_all_single", "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced"),
    *("allreduce_coalesced", "alltoall", "alltoall_base", "gather", "gather_into_tensor", "gather_single"),
    *("monitored_barrier", "recv", "recv_anysource", "reduce", "reduce_scatter", "reduce_scatter_single"),
    *("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "scatter", "send"),
)

_BARRIERS = frozenset({"barrier", "monitored_barrier"})
_TRANSFERS = frozenset({"send", "recv", "recv_anysource"})
_NOBODY = ""  # name of a wait that is not in the account
_EVERYBODY = "all ranks"


@functools.cache
def spans_stages(group: Any) -> bool:
    """True if the process group has ranks of more than one stage of this rank's pipeline."""
    import torch
    from megatron.core import parallel_state

    pipeline = parallel_state.get_pipeline_model_parallel_group(check_initialized=False)
    if pipeline is None or pipeline.size() == 1:
        return False
    ranks = torch.distributed.get_process_group_ranks(group)
    return len(set(ranks) & set(torch.distributed.get_process_group_ranks(pipeline))) > 1


# Functions of parallel_state that return a group, in the order in which names count for a group that none returns.
_NAMED: tuple[tuple[str, dict[str, bool], str], ...] = (
    ("get_tensor_model_parallel_group", {}, "tensor group"),
    ("get_context_parallel_group", {}, "context group"),
    ("get_data_parallel_group", {}, "data group"),
    ("get_data_parallel_group", {"with_context_parallel": True}, "data group"),
    ("get_expert_model_parallel_group", {}, "expert group"),
    ("get_expert_tensor_parallel_group", {}, "expert group"),
    ("get_expert_tensor_and_model_parallel_group", {}, "expert group"),
    ("get_expert_data_parallel_group", {}, "data group"),
)


@functools.cache
def wait_name(group: Any, *, meets: bool = False) -> str:
    """Return the name in the account of a wait in this group; empty for a group of one rank, which never waits.

    A barrier (``meets``) of all ranks is nothing that the replicas exchange, also where all are replicas.
    """
    import torch
    from megatron.core import parallel_state

    ranks = set(torch.distributed.get_process_group_ranks(group))
    if len(ranks) == 1:
        return _NOBODY
    if meets and len(ranks) == torch.distributed.get_world_size():
        return _EVERYBODY
    alike = ""  # name of the first group with the same ranks: another of Megatron's, such as the one over gloo
    for getter, arguments, name in _NAMED:
        with contextlib.suppress(AssertionError, AttributeError, TypeError):  # not made, or not in this version
            one = getattr(parallel_state, getter)(**arguments)
            if one is group:  # experts, say, may have the same ranks as replicas, but a group of their own
                return name
            if not alike and ranks == set(torch.distributed.get_process_group_ranks(one)):
                alike = name
    if alike:
        return alike
    return _EVERYBODY if len(ranks) == torch.distributed.get_world_size() else "other groups"


def blocks(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if a call of a process group returns only after the other ranks have made it, too."""
    if name == "monitored_barrier":
        return True
    options = kwargs.get("opts") or (args[-1] if args else None)
    return getattr(options, "asyncOp", True) is False


def wrap_calls(stack: contextlib.ExitStack, wrapper: Callable[[Call, str], Call]) -> None:
    """Wrap all methods of process groups that communicate, by ``wrapper(method, name)``."""
    import torch

    groups = torch.distributed.ProcessGroup
    for name in (*_ALWAYS, *(name for name in _CALLS if hasattr(groups, name))):
        wrap(stack, groups, name, wrapper, name)


def install(stack: contextlib.ExitStack) -> None:
    """Open bubbles in collectives until ``stack`` is closed."""
    import torch

    # The name in the account of work that was not waited for when it was posted; None for work across stages.
    pending: dict[ref[Any], str | None] = {}
    account = bus.account
    latest = ""  # name of the latest call between passes

    def forget(work: ref[Any]) -> None:
        pending.pop(work, None)

    def posts_transfer(name: str) -> bool:
        """True for a transfer, and for the end of a batch of them."""
        nonlocal latest
        before, latest = latest, name
        return name in _TRANSFERS or (name == "_end_coalescing" and before in _TRANSFERS)

    def watched_wait(wait: Call) -> Call:
        def run(work: Any, *args: Any, **kwargs: Any) -> Any:
            if not pending or (key := ref(work)) not in pending:
                return wait(work, *args, **kwargs)
            name = pending[key]
            if name is None:
                if not bus.between_passes:
                    return wait(work, *args, **kwargs)
                del pending[key]
                return bus.blocked(functools.partial(wait, work, *args, **kwargs))
            return bus.wait_for_group(functools.partial(wait, work, *args, **kwargs), name)

        return run

    def watched(call: Call, name: str) -> Call:
        def run(group: Any, *args: Any, **kwargs: Any) -> Any:
            across = bus.between_passes and (posts_transfer(name) or spans_stages(group))
            ours = across or (account.settled and account.thread == get_ident())
            whose = wait_name(group, meets=name in _BARRIERS) if ours else _NOBODY
            if not whose:
                return call(group, *args, **kwargs)
            if not blocks(name, args, kwargs):
                work = call(group, *args, **kwargs)
                if work is not None:
                    pending[ref(work, forget)] = None if across else whose
                return work
            finish = functools.partial(_finished, call, group, *args, **kwargs)
            return bus.blocked(finish) if across else bus.wait_for_group(finish, whose)

        return run

    for kind in definers(torch.distributed.Work, "wait"):
        wrap(stack, kind, "wait", watched_wait)
    wrap_calls(stack, watched)
    stack.callback(spans_stages.cache_clear)
    stack.callback(wait_name.cache_clear)


def _finished(call: Call, group: Any, *args: Any, **kwargs: Any) -> Any:
    """Make the call and wait for its work, as torch does afterwards, so that the whole wait is in the bubble."""
    work = call(group, *args, **kwargs)
    if work is not None:
        work.wait()
    return work

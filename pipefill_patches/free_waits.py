"""Pipeline receives that leave the GPU free until their data is ready (--fill-free-waits).

Both functions that post transfers are wrapped, inside the watching wrappers of ``p2p_communicator``.  All sends of a
call are announced first; then each receive is posted on a stream that is held until its sender has announced it
(``megatron.fill.rank.freewaits``).  The compute stream is never held: it waits where the schedule waits.

* Transfers posted one by one: each receive is held separately; sends are not held.
* Batched transfers: NCCL starts a batch as a whole, so a send in it would be held too.  A batch is held only if all of
  it is with one neighbour, because that neighbour's batch both announces and receives the send.
* With ``CUDA_DEVICE_MAX_CONNECTIONS=1`` all work enqueued after a wait is queued behind it, in any stream.  So only
  transfers are held that the schedule waits for immediately.

If anything fails here, the transfers are posted as Megatron does.  The shapes exchanged for sequences of varying
lengths, and Megatron's ring exchange, are not held.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from typing import Any

from megatron.fill.attached import HeldReceives, attached
from megatron.fill.errors import FillError, PatchError
from pipefill_patches import p2p_communicator
from pipefill_patches.patch import Call, Patch, Target, around

logger = logging.getLogger("pipefill")

_MODULE = "megatron.core.pipeline_parallel.p2p_communication"
_PARAMETERS = (
    *("tensor_send_prev", "tensor_recv_prev", "tensor_send_next", "tensor_recv_next"),
    *("group", "prev_pipeline_rank", "next_pipeline_rank"),
)
_SIDES = ("next", "prev")

_POST = Target(f"{_MODULE}:_p2p_ops", _PARAMETERS, uses=("irecv",))
_POST_BATCHED = Target(f"{_MODULE}:_batched_p2p_ops", _PARAMETERS)


def _holds() -> bool:
    """True if receives of the call in progress may be held."""
    return p2p_communicator.transfers.waits or os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1"


def _announce(waits: HeldReceives, transfers: dict[str, Any]) -> None:
    """Announce a call's sends, in the order in which they are posted: with two stages both are to the same rank."""
    for side in _SIDES:
        if transfers[f"tensor_send_{side}"] is not None:
            waits.announce(transfers[f"{side}_pipeline_rank"])


@contextlib.contextmanager
def _off_where_it_fails() -> Any:
    """Turn free waits off, permanently, if the driver refuses something; the training continues."""
    try:
        yield
    except FillError as error:
        logger.warning("waits for other stages leave the GPU free no longer: %s", error)
        attached.wait_usually()


def _while_held(post: Call, held: Callable[[HeldReceives, Call, dict[str, Any]], Any], /, **transfers: Any) -> Any:
    waits = attached.waits
    return post(**transfers) if waits is None else held(waits, post, transfers)


def _one_by_one(waits: HeldReceives, post: Call, transfers: dict[str, Any]) -> Any:
    import torch.distributed as dist

    with _off_where_it_fails():
        _announce(waits, transfers)
    # For this call only: in a batch, torch identifies a transfer's kind by the function dist.irecv itself.
    receive, dist.irecv = dist.irecv, _receiving(dist.irecv)
    try:
        return post(**transfers)
    finally:
        dist.irecv = receive


def _receiving(receive: Call) -> Call:
    def irecv(*, src: int, **kwargs: Any) -> Any:
        waits = attached.waits
        with contextlib.ExitStack() as stack:
            if waits is not None:
                with _off_where_it_fails():
                    stack.enter_context(waits.receive(src, hold=_holds()))
            return receive(src=src, **kwargs)

    return irecv


def _batched(waits: HeldReceives, post: Call, transfers: dict[str, Any]) -> Any:
    sides = [side for side in _SIDES if any(transfers[f"tensor_{way}_{side}"] is not None for way in ("send", "recv"))]
    with contextlib.ExitStack() as stack:
        with _off_where_it_fails():
            _announce(waits, transfers)
            for side in sides:
                if transfers[f"tensor_recv_{side}"] is not None:
                    hold = len(sides) == 1 and _holds()
                    stack.enter_context(waits.receive(transfers[f"{side}_pipeline_rank"], hold=hold))
        return post(**transfers)


def _install(stack: contextlib.ExitStack) -> None:
    if p2p_communicator.PATCH.applied:
        raise PatchError("patch 'free_waits' must be applied before 'p2p_communicator', which watches its waits")
    around(stack, *_POST.resolve(), _while_held, _one_by_one)
    around(stack, *_POST_BATCHED.resolve(), _while_held, _batched)
    stack.callback(attached.wait_usually)


PATCH = Patch("free_waits", _install, (_POST, _POST_BATCHED))

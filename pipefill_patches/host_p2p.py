"""Pipeline transfers through the host's memory, for several ranks on one GPU.

NCCL refuses two ranks on one GPU before 2.30, and gloo sends no CUDA tensors.  So tensors are copied into pinned memory
before gloo sends them, and out of it when the receive is waited for.  Both functions that post transfers are wrapped,
inside the watching wrappers of ``p2p_communicator``: the copy back belongs to the wait, and so to the bubble.

Gloo also lacks the coalesced all-reduce of CUDA tensors that Megatron uses for gradients, even in groups of one rank.
So gradients are reduced one by one, and not at all in a group of one rank.

It is for trials on one GPU, and applied only on ``PIPEFILL_HOST_P2P=1``, with ``--distributed-backend gloo``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.fill.errors import ConfigError, PatchError
from pipefill_patches import p2p_communicator
from pipefill_patches.p2p_communicator import POST, POST_BATCHED, TRANSFERS
from pipefill_patches.patch import Call, Patch, Target, around, replace

_REDUCE = Target(
    "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.start_grad_sync",
    ("self",),
    uses=("_coalescing_manager",),
)
_ALL_REDUCE = Target("torch.distributed:all_reduce", ("tensor", "op", "group", "async_op"))


def _staged(tensor: Any) -> bool:
    """True if a tensor has to be transferred through the host."""
    return tensor.is_cuda


@dataclass(eq=False, repr=False, slots=True)
class _StagedRequest:
    """A transfer of a copy in host memory; a received one is copied to its ``target`` after the wait."""

    _request: Any
    _copy: Any  # also kept alive until the transfer is done
    _target: Any

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        import torch

        result = self._request.wait(*args, **kwargs)
        if self._target is not None:
            with torch.no_grad():  # the target may be a leaf that requires a gradient
                self._target.copy_(self._copy, non_blocking=True)
            self._target = None
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def _through_host(post: Call, /, **kwargs: Any) -> Any:
    copies: dict[str, tuple[Any, Any]] = {}  # copy and target of each transfer, by the request's name
    for name in TRANSFERS:
        tensor = kwargs[name]
        if tensor is not None:
            key = name.removeprefix("tensor_")
            kwargs[name], target = _stage(tensor, received=key.startswith("recv"))
            copies[key] = kwargs[name], target
    requests = post(**kwargs)
    if isinstance(requests, dict):
        return {key: _StagedRequest(request, *copies[key]) for key, request in requests.items()}
    # gloo has one request for each transfer.
    return [_StagedRequest(request, *copy) for request, copy in zip(requests, copies.values(), strict=True)]


def _stage(tensor: Any, received: bool) -> tuple[Any, Any]:
    """Return the copy to transfer instead of a tensor, and the tensor to copy it to after the wait, if any."""
    import torch

    if not _staged(tensor):
        return tensor, None
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=torch.cuda.is_available())
    if received:
        return copy, tensor
    copy.copy_(tensor.detach())  # waits for the GPU: gloo reads the copy at once
    return copy, None


@contextlib.contextmanager
def _one_by_one(group: Any = None, device: Any = None, async_ops: bool | None = False) -> Iterator[None]:
    """Replace torch's coalescing: each collective inside runs separately."""
    if async_ops:
        raise ConfigError(
            "PIPEFILL_HOST_P2P=1 reduces gradients one after the other: expected no --overlap-grad-reduce"
        )
    yield


def _unless_alone(all_reduce: Call, /, *args: Any, **kwargs: Any) -> Any:
    """Reduce, but do nothing if the call blocks and its group is of one rank (gloo would copy through the host)."""
    group = kwargs.get("group") or (args[2] if len(args) > 2 else None)
    waits = not (kwargs.get("async_op") or (len(args) > 3 and args[3]))
    if group is not None and waits and group.size() == 1:
        return None
    return all_reduce(*args, **kwargs)


def _install(stack: contextlib.ExitStack) -> None:
    if p2p_communicator.PATCH.applied:
        raise PatchError("patch 'host_p2p' must be applied before 'p2p_communicator', which watches its waits")
    from megatron.core.distributed import param_and_grad_buffer

    around(stack, *POST.resolve(), _through_host)
    around(stack, *POST_BATCHED.resolve(), _through_host)
    replace(stack, param_and_grad_buffer, "_coalescing_manager", _one_by_one)
    around(stack, *_ALL_REDUCE.resolve(), _unless_alone)


PATCH = Patch("host_p2p", _install, (POST, POST_BATCHED, _REDUCE, _ALL_REDUCE))

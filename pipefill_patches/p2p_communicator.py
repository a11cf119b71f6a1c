"""Bubbles around the point-to-point transfers of the pipeline.

``P2PCommunicator._communicate`` is the one place through which every pipeline send and receive goes; its signature is
the same in core 0.14 to 0.19.  A send can wait as well (gloo's waits for the receiver), so every blocking call counts.
With overlapped communication the wait happens later, in the handles it returns: these are wrapped then.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from megatron.fill.hooks import bus
from pipefill_patches.registry import Patch, Target, replace

_COMMUNICATE = Target(
    "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate",
    ("self", "tensor_send_next", "tensor_send_prev", "recv_prev", "recv_next", "tensor_shape", "wait_on_reqs"),
)


class _WaitedRequest:
    """A communication handle whose ``wait`` is a bubble."""

    __slots__ = ("_for_backward", "_request")

    def __init__(self, request: Any, for_backward: bool) -> None:
        self._request = request
        self._for_backward = for_backward

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        bus.open(for_backward=self._for_backward)
        try:
            return self._request.wait(*args, **kwargs)
        finally:
            bus.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def _install(stack: contextlib.ExitStack) -> None:
    holder, name = _COMMUNICATE.resolve()
    original = getattr(holder, name)

    @functools.wraps(original)
    def communicate(
        self: Any,
        *,
        tensor_send_next: Any,
        tensor_send_prev: Any,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
        wait_on_reqs: bool = True,
    ) -> Any:
        transfers = recv_prev or recv_next or tensor_send_next is not None or tensor_send_prev is not None
        waits = wait_on_reqs and transfers
        if waits:
            bus.open(for_backward=recv_next)
        try:
            received_prev, received_next, requests = original(
                self,
                tensor_send_next=tensor_send_next,
                tensor_send_prev=tensor_send_prev,
                recv_prev=recv_prev,
                recv_next=recv_next,
                tensor_shape=tensor_shape,
                wait_on_reqs=wait_on_reqs,
            )
        finally:
            if waits:
                bus.close()
        if not wait_on_reqs and requests:
            requests = {key: _WaitedRequest(request, key == "recv_next") for key, request in requests.items()}
        return received_prev, received_next, requests

    replace(stack, holder, name, communicate)


PATCH = Patch("p2p_communicator", "every pipeline transfer goes through _communicate", _install, (_COMMUNICATE,))

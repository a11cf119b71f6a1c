"""Bubbles around the waits of the pipeline's point-to-point transfers.

Every pipeline send and receive goes through ``P2PCommunicator._communicate``, which posts the
transfers with one of two functions and waits for them.  A bubble opens with the first wait, when
everything is posted and the rank has nothing left to do, and closes with the call.  With sequences of varying lengths,
``_communicate`` exchanges shapes first, and that is the first wait.  A send can wait as well (gloo's waits for the
receiver), so every wait counts.  With overlapped communication ``_communicate`` does not wait but returns the handles,
and each of their waits is a separate bubble.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from megatron.fill.hooks import bus
from pipefill_patches.patch import Call, Patch, Target, wrap

_MODULE = "megatron.core.pipeline_parallel.p2p_communication"
_COMMUNICATE = Target(
    f"{_MODULE}:P2PCommunicator._communicate",
    ("self", "tensor_send_next", "tensor_send_prev", "recv_prev", "recv_next", "tensor_shape", "wait_on_reqs"),
)
# The order in which the batched function posts them.
TRANSFERS = ("tensor_send_prev", "tensor_recv_prev", "tensor_send_next", "tensor_recv_next")
POST = Target(f"{_MODULE}:_p2p_ops", TRANSFERS)
POST_BATCHED = Target(f"{_MODULE}:_batched_p2p_ops", TRANSFERS)
_SHAPES = Target(
    f"{_MODULE}:P2PCommunicator._communicate_shapes",
    ("self", "tensor_send_next", "tensor_send_prev", "recv_prev", "recv_next"),
)


class Transfers:
    """The ``_communicate`` call in progress: ``waits`` if it waits for its transfers itself, ``for_backward`` if it
    waits for an output gradient.
    """

    waits = for_backward = False

    def communicate(self, original: Call) -> Call:
        def communicate(this: Any, *, recv_next: bool, wait_on_reqs: bool = True, **kwargs: Any) -> Any:
            self.waits, self.for_backward = wait_on_reqs, recv_next
            try:
                return original(this, recv_next=recv_next, wait_on_reqs=wait_on_reqs, **kwargs)
            finally:
                if wait_on_reqs:
                    bus.close()

        return communicate

    def exchange(self, original: Call) -> Call:
        def communicate_shapes(*args: Any, **kwargs: Any) -> Any:
            bus.open(for_backward=self.for_backward)
            try:
                return original(*args, **kwargs)
            finally:
                if not self.waits:
                    bus.close()

        return communicate_shapes

    def post(self, original: Call) -> Call:
        def post(**kwargs: Any) -> Any:
            requests, closes = original(**kwargs), not self.waits
            if isinstance(requests, dict):
                for_backward = {key: key == "recv_next" if closes else self.for_backward for key in requests}
                return {key: _WatchedRequest(request, for_backward[key], closes) for key, request in requests.items()}
            return [_WatchedRequest(request, self.for_backward, closes) for request in requests]

        return post


transfers = Transfers()


@dataclass(eq=False, repr=False, slots=True)
class _WatchedRequest:
    """A transfer whose ``wait`` opens a bubble, and closes it unless the call in progress does."""

    _request: Any
    _for_backward: bool
    _closes: bool

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        bus.open(for_backward=self._for_backward)
        try:
            return self._request.wait(*args, **kwargs)
        finally:
            if self._closes:
                bus.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def _install(stack: contextlib.ExitStack) -> None:
    wrap(stack, *_COMMUNICATE.resolve(), transfers.communicate)
    wrap(stack, *_SHAPES.resolve(), transfers.exchange)
    wrap(stack, *POST.resolve(), transfers.post)
    wrap(stack, *POST_BATCHED.resolve(), transfers.post)


PATCH = Patch("p2p_communicator", _install, (_COMMUNICATE, _SHAPES, POST, POST_BATCHED))

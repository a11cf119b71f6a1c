"""Runs a training script in which something is late between rank 0 and rank 1, by ``LATE_S`` each time.

    python late.py WHAT SCRIPT FLAGS...

``peer``: rank 0 computes longer in each forward.  ``host``: rank 0 sleeps before it sends a forward's result.
``link``: what rank 1 receives takes longer.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Callable
from typing import Any

LATE_S = 0.1


def _later(owner: Any, name: str, where: Callable[..., bool] = lambda *args, **kwargs: True) -> None:
    """Sleep before each call of a method for which ``where`` holds."""
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if where(*args, **kwargs):
            time.sleep(LATE_S)
        return original(*args, **kwargs)

    setattr(owner, name, call)


def _sends_forward(_self: Any, *, tensor_send_next: Any = None, **_others: Any) -> bool:
    return tensor_send_next is not None


def _slow_link() -> None:
    """Make every transfer that is posted in one batch longer."""
    import torch.distributed as dist

    post = dist.batch_isend_irecv

    class Slow:
        def __init__(self, work: Any) -> None:
            self._work = work

        def wait(self, *args: Any, **kwargs: Any) -> Any:
            time.sleep(LATE_S)
            return self._work.wait(*args, **kwargs)

    dist.batch_isend_irecv = lambda operations: [Slow(work) for work in post(operations)]


def make_late(what: str) -> None:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    rank = os.environ["RANK"]
    if what == "link" and rank == "1":
        _slow_link()
    elif what == "peer" and rank == "0":
        _later(GPTModel, "forward")
    elif what == "host" and rank == "0":
        _later(P2PCommunicator, "_communicate", _sends_forward)


def main() -> None:
    what, *sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    make_late(what)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()

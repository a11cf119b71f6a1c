"""Runs a training script, and then ends or begins again as scripts of users do.

    python ending.py HOW SCRIPT FLAGS...

``destroyed``: every rank destroys its process groups.  ``works on``: rank 0 goes on until rank 1 has ended.
``again``: in the fourth iteration every rank fails, and trains again in the same process (``--inprocess-restart``).
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

from megatron.fill.linux.wakeup import readable
from scripts.benchmarks.one_gpu import free_port

_MOST_S = 60.0
_WELL = 3  # iterations before the one that fails


class Fault(Exception):
    """What ends the first training."""


def run() -> None:
    runpy.run_path(sys.argv[0], run_name="__main__")


def run_twice() -> None:
    import torch.distributed as dist
    from megatron.training import training

    train_step, begun = training.train_step, 0

    def step(*args: Any, **kwargs: Any) -> Any:
        nonlocal begun
        begun += 1
        if begun == _WELL + 1:
            raise Fault
        return train_step(*args, **kwargs)

    training.train_step = step
    try:
        run()
    except Fault:
        with free_port() as port:
            ports = [port]
            dist.broadcast_object_list(ports, src=0)
            os.environ["MASTER_PORT"] = str(ports[0])
            dist.destroy_process_group()
            training.destroy_global_state()
            run()


def main() -> None:
    how, *sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    if how == "again":
        run_twice()
        return
    run()
    import torch.distributed as dist

    if how == "destroyed":
        dist.destroy_process_group()
        return
    pids = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    other = os.pidfd_open(pids[1]) if dist.get_rank() == 0 else None
    dist.barrier()  # it has not ended before it is watched
    if other is not None:
        print("rank 1 has ended" if readable(_MOST_S, other) else "rank 1 waits", flush=True)


if __name__ == "__main__":
    main()

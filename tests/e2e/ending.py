"""Runs a training script, and then ends as scripts of users do.

    python ending.py HOW SCRIPT FLAGS...

``destroyed``: every rank destroys its process groups.  ``works on``: rank 0 goes on until rank 1 has ended.
"""

from __future__ import annotations

import os
import runpy
import sys

from megatron.fill.linux.wakeup import readable

_MOST_S = 60.0


def main() -> None:
    how, *sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
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

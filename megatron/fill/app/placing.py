"""``--fill-rank-order``: this process takes the rank that was chosen for its place, before there are process groups.

Only the rank changes.  The device, the core and the node are those of the process: ``LOCAL_RANK``, ``GROUP_RANK`` and
their sizes stay.
"""

from __future__ import annotations

import os
from typing import Any

from megatron.fill.launcher import ranks_here

_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # torch's: somebody serves a store at MASTER_ADDR, every rank is a client


def world_size() -> int:
    """How many processes the launcher has started."""
    return int(os.environ.get("WORLD_SIZE") or 1)


class Place:
    """Where this process runs, and which rank it has there.  What it serves lives as long as this object.

    Attributes:
        rank: the logical one; None before it is taken.
    """

    def __init__(self) -> None:
        self.rank: int | None = None
        self._store: Any = None

    def take_rank(self, order: tuple[int, ...]) -> int:
        """Change ``RANK`` to the logical rank of this process, and see to it that the ranks still find each other.

        Args:
            order: the physical rank of each logical one, for ``world_size()`` ranks.

        Returns:
            The logical rank.
        """
        physical = int(os.environ.get("RANK") or 0)
        self.rank = order.index(physical)
        _keep_place(physical, len(order))
        if len(order) > 1 and os.environ.get(_AGENT_STORE) != str(True):
            self._store = _serve(physical)
        os.environ["RANK"] = str(self.rank)
        return self.rank


def _keep_place(physical: int, ranks: int) -> None:
    """Say where this process is, if the launcher has not: it cannot be told from its rank any more."""
    here = ranks_here(ranks)
    local = os.environ.get("SLURM_LOCALID") or str(physical % here)
    for name, value in (("LOCAL_RANK", local), ("GROUP_RANK", str(physical // here))):
        if not os.environ.get(name):
            os.environ[name] = value


def _serve(physical: int) -> Any:
    """Have the process that runs at ``MASTER_ADDR`` serve the store there, though it may not be rank 0 any more."""
    os.environ[_AGENT_STORE] = str(True)
    if physical != 0:
        return None
    from torch.distributed import TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=True, wait_for_workers=False)

"""What ranks and agents could not write down is gathered on rank 0 when the training is over, for its report.

It goes through the key-value store of the process group, which Megatron has made anyway: no collective is added, no
memory of a GPU is used, and nobody waits for a rank that is gone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from megatron.fill.records import Unwritten

_RANK_BYTES, _ALL_BYTES = 4 << 20, 128 << 20  # the most of one rank, and of all together
_COUNT, _OF_RANK = "pipefill/unwritten", "pipefill/unwritten/{}"
_MOST_S = 20.0  # for one question to the store


def hand_in(rank: int, ranks: int, unwritten: Unwritten) -> None:
    """Before all ranks meet for the last time: leave it for rank 0."""
    if not unwritten:
        return
    with _store() as store:
        store.set(_OF_RANK.format(rank), unwritten.packed(min(_RANK_BYTES, _ALL_BYTES // ranks)))
        store.add(_COUNT, 1)


def collect(ranks: int) -> dict[int, Unwritten]:
    """After that, on rank 0: by rank, what was left."""
    with _store() as store:
        left = store.add(_COUNT, 0)
        names = {rank: _OF_RANK.format(rank) for rank in range(ranks if left else 0)}
        # `check` answers at once: one that is not there now will not come.
        return {rank: Unwritten.unpacked(store.get(name)) for rank, name in names.items() if store.check([name])}


@contextlib.contextmanager
def _store() -> Iterator[Any]:
    """The process group's store, with an end to each question."""
    from torch.distributed import distributed_c10d

    store = distributed_c10d._get_default_store()
    usual = store.timeout
    store.set_timeout(timedelta(seconds=_MOST_S))
    try:
        yield store
    finally:
        store.set_timeout(usual)

"""Records that ranks and agents could not write, gathered on rank 0 at the end of the training for its report.

They go through the key-value store of the process group, which Megatron has made anyway: no collective is added, no GPU
memory is used, and no rank waits for one that has ended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from megatron.fill.records import Unwritten

_RANK_BYTES, _ALL_BYTES = 4 << 20, 128 << 20  # limits for one rank, and for all together
_COUNT, _OF_RANK = "pipefill/unwritten", "pipefill/unwritten/{}"
_MOST_S = 20.0  # timeout of a request to the store


def hand_in(rank: int, ranks: int, unwritten: Unwritten) -> None:
    """Store a rank's unwritten records for rank 0; called before the last barrier."""
    if not unwritten:
        return
    with _store() as store:
        store.set(_OF_RANK.format(rank), unwritten.packed(min(_RANK_BYTES, _ALL_BYTES // ranks)))
        store.add(_COUNT, 1)


def collect(ranks: int) -> dict[int, Unwritten]:
    """Return the unwritten records by rank; called on rank 0 after the last barrier."""
    with _store() as store:
        left = store.add(_COUNT, 0)
        names = {rank: _OF_RANK.format(rank) for rank in range(ranks if left else 0)}
        # `check` does not wait: a key that is missing now will not come.
        return {rank: Unwritten.unpacked(store.get(name)) for rank, name in names.items() if store.check([name])}


@contextlib.contextmanager
def _store() -> Iterator[Any]:
    """Provide the process group's store, with a timeout for each request."""
    from torch.distributed import distributed_c10d

    store = distributed_c10d._get_default_store()
    usual = store.timeout
    store.set_timeout(timedelta(seconds=_MOST_S))
    try:
        yield store
    finally:
        store.set_timeout(usual)

"""Sets up free waits (``--fill-free-waits``): pipeline receives that leave the GPU free while they wait."""

from __future__ import annotations

import socket
import threading
from argparse import Namespace
from pathlib import Path
from typing import Any

from megatron.fill.attached import attached
from megatron.fill.errors import ConfigError, FillError
from megatron.fill.pages.ready import ReadyPage
from megatron.fill.rank.freewaits import CudaStreams, FreeWaits, guard
from megatron.fill.types import RankInfo

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_FLAG = "--fill-free-waits"


def check_free_waits(args: Namespace, *, active: bool, on_cpu: bool, through_host: bool) -> None:
    """Raise ConfigError if the receives of this training cannot be held up."""
    if not active:
        raise ConfigError(
            f"{_FLAG} leaves the GPU to jobs; expected --fill-jobs, --fill-store or --fill-report with it"
        )
    if on_cpu:
        raise ConfigError(f"{_FLAG}: the training is on the CPU, where a rank that waits leaves its core anyway")
    if through_host:
        raise ConfigError(f"{_FLAG} makes no sense with PIPEFILL_HOST_P2P=1, whose transfers wait on the host")
    if getattr(args, "use_ring_exchange_p2p", False):
        raise ConfigError(f"{_FLAG} does not know Megatron's ring exchange; expected no --use-ring-exchange-p2p")


class Freed:
    """The free waits of one rank, from the exchange of pages within its node to the end of the training.

    All ranks create it at the same time (a collective); FillError, on all of them, if some rank cannot.
    """

    def __init__(self, info: RankInfo) -> None:
        import torch.distributed as dist

        def gathered(mine: Any) -> list[Any]:
            found: list[Any] = [None] * info.world_size
            dist.all_gather_object(found, mine)
            return found

        # A rank takes part in both collectives even if something fails on it: the others wait there.
        own, node, refused = None, "", ""
        try:
            node = f"{socket.gethostname()} {_BOOT.read_text(encoding='ascii').strip()}"
            own = ReadyPage.create(info.world_size)
        except Exception as error:
            refused = f"rank {info.rank}: {error}"
        places = gathered((node, own and own.path))
        waits = None
        try:
            if own is not None:
                here = {rank: path for rank, (where, path) in enumerate(places) if path is not None and where == node}
                others = {rank: ReadyPage(path, info.world_size) for rank, path in here.items() if rank != info.rank}
                waits = FreeWaits(CudaStreams(info.device, own, list(others.values())), own, others, info.rank)
        except Exception as error:
            refused = refused or f"rank {info.rank}: {error}"
        wrong = list(filter(None, gathered(refused)))
        if own is not None:
            own.forget()  # all ranks have opened it
        if wrong or waits is None:
            raise FillError(f"{_FLAG} cannot be had, so ranks wait as NCCL does: {wrong[0]}")
        self._ended = threading.Event()
        threading.Thread(target=guard, args=(waits, self._ended), name="free-waits", daemon=True).start()
        attached.waits = waits

    def end(self) -> None:
        """Return to usual waits: no receive is held up from now on."""
        self._ended.set()
        attached.wait_usually()

"""Has this rank's pipeline receives leave the GPU free, where --fill-free-waits asks for it."""

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
    """Whether receives of this training can be held up at all.

    Raises:
        ConfigError: they cannot.
    """
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
    """One rank's free waits, from when all ranks of its node have each other's pages to the end of the training.

    All ranks make it at the same time.

    Raises:
        FillError: the driver of some rank refuses; on all ranks.
    """

    def __init__(self, info: RankInfo) -> None:
        import torch.distributed as dist

        own = ReadyPage.create(info.world_size)
        node = f"{socket.gethostname()} {_BOOT.read_text(encoding='ascii').strip()}"
        places: list[Any] = [None] * info.world_size
        others: dict[int, ReadyPage] = {}
        refused = ""
        try:
            dist.all_gather_object(places, (node, own.path))
            for rank, (where, path) in enumerate(places):
                if where == node and rank != info.rank:
                    others[rank] = ReadyPage(path, info.world_size)
            streams = CudaStreams(info.device, own, list(others.values()))
        except (OSError, FillError) as error:
            refused = f"rank {info.rank}: {error}"
        found: list[Any] = [None] * info.world_size
        dist.all_gather_object(found, refused)
        own.forget()  # everybody has opened it
        if any(found):
            raise FillError(f"{_FLAG} cannot be had, so ranks wait as NCCL does: {next(filter(None, found))}")
        waits = FreeWaits(streams, own, others, info.rank)
        self._ended = threading.Event()
        threading.Thread(target=guard, args=(waits, self._ended), name="free-waits", daemon=True).start()
        attached.waits = waits

    def end(self) -> None:
        """Hold nothing up any more."""
        self._ended.set()
        attached.wait_usually()

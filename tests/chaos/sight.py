"""Facts about a run that are visible from outside only, for its attackers."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from megatron.fill.folders import PARTS
from tests.chaos.attacks import cgroups, network
from tests.chaos.targets import Targets

_MOST_FILES = 200


def look(ranks: Iterable[int], agents: Iterable[int], run: Path) -> Targets:
    """Return the targets in a run folder.

    Args:
        ranks, agents: pids in this process namespace.
    """
    files = [path for part in PARTS for depth in ("*", "*/*") for path in sorted(run.glob(f"{part}/{depth}"))]
    listening = [port for _, _, port in network.listeners()]
    return Targets(
        os.stat("/proc/self/ns/pid").st_ino,
        tuple(ranks),
        tuple(agents),
        tuple(map(str, files[:_MOST_FILES])),
        tuple((str(path), version) for path, version in cgroups.roots()),
        tuple(dict.fromkeys(listening)),
        tuple(network.unix_names(run)),
    )

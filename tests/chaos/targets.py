"""Targets that the sandbox may hide from attackers, and that the driver tells them: pids, files, sockets.

An attack that sees no rank would prove nothing.  With the pids it asks the kernel, whose answer counts.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

_NAME = "targets.json"


@dataclass(frozen=True, slots=True)
class Targets:
    """The known targets in a run.

    Attributes:
        namespace: inode of the process namespace of the pids.
        ranks, agents: pids; the wardens are among the agents.
        files: paths in the run folder.
        cgroups: mount points of cgroup file systems outside, with their version.
        ports, sockets: listening ports of the loopback interface, and unix sockets by name, outside.
    """

    namespace: int = 0
    ranks: tuple[int, ...] = ()
    agents: tuple[int, ...] = ()
    files: tuple[str, ...] = ()
    cgroups: tuple[tuple[str, int], ...] = ()
    ports: tuple[int, ...] = ()
    sockets: tuple[str, ...] = ()

    def write(self, folder: Path) -> None:
        """Write them atomically, for ``read``."""
        fresh = folder / f".{_NAME}"
        fresh.write_text(json.dumps(asdict(self)), encoding="utf-8")
        fresh.chmod(0o644)
        os.replace(fresh, folder / _NAME)

    @classmethod
    def read(cls, folder: Path) -> Targets:
        """The targets that were written last; empty if none were."""
        with suppress(OSError):
            found = json.loads((folder / _NAME).read_text(encoding="utf-8"))
            cgroups = tuple((str(path), int(version)) for path, version in found.pop("cgroups"))
            namespace = int(found.pop("namespace"))
            return cls(namespace, **{name: tuple(value) for name, value in found.items()}, cgroups=cgroups)
        return cls()


NOTHING = Targets()

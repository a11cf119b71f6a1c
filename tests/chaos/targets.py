"""What a chaos run tells its attackers of what walls may hide from them: numbers of processes, and files.

An attack that sees nobody would prove nothing.  With the numbers it asks the kernel, whose answer counts.
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
    """What is known of a run.

    Attributes:
        namespace: the inode of the process namespace that the numbers are of.
        ranks, agents: processes; wardens are among the agents.
        files: of the run folder.
        cgroups: where cgroups are mounted outside: folder and version.
        ports, sockets: where somebody listens outside: on the loopback interface, and unix sockets by name.
    """

    namespace: int = 0
    ranks: tuple[int, ...] = ()
    agents: tuple[int, ...] = ()
    files: tuple[str, ...] = ()
    cgroups: tuple[tuple[str, int], ...] = ()
    ports: tuple[int, ...] = ()
    sockets: tuple[str, ...] = ()

    def write(self, folder: Path) -> None:
        """Where ``read`` finds it, at once and whole."""
        fresh = folder / f".{_NAME}"
        fresh.write_text(json.dumps(asdict(self)), encoding="utf-8")
        fresh.chmod(0o644)
        os.replace(fresh, folder / _NAME)

    @classmethod
    def read(cls, folder: Path) -> Targets:
        """What was written last; nothing is known where nothing was."""
        with suppress(OSError):
            found = json.loads((folder / _NAME).read_text(encoding="utf-8"))
            cgroups = tuple((str(path), int(version)) for path, version in found.pop("cgroups"))
            namespace = int(found.pop("namespace"))
            return cls(namespace, **{name: tuple(value) for name, value in found.items()}, cgroups=cgroups)
        return cls()


NOTHING = Targets()  # is known

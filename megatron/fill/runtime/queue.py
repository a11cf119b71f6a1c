"""The run's jobs as files in the run folder: which agent has which, decided by the file system.

Creating a file exclusively is atomic, also on a shared file system, so agents of all ranks and nodes can take from one
queue and no job is taken twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_CLAIM = "claimed-by"


class ClaimQueue:
    """The jobs of a run, highest priority first, each taken by at most one agent.

    Args:
        run_dir: the run folder; each job has a folder ``jobs/NAME`` in it.
        names: the jobs in the order in which they should start.
    """

    def __init__(self, run_dir: Path, names: Sequence[str]) -> None:
        self._jobs = run_dir / "jobs"
        self._names = list(names)

    def prepare(self) -> None:
        """Make the jobs' folders and forget the claims of an earlier run; called by one process, before any claim."""
        for name in self._names:
            directory = self.directory(name)
            directory.mkdir(parents=True, exist_ok=True)
            (directory / _CLAIM).unlink(missing_ok=True)

    def directory(self, name: str) -> Path:
        return self._jobs / name

    def claim(self, who: str, first: int = 0) -> str | None:
        """Take the next free job, looking from position ``first`` on and then from the beginning; None if all are
        taken."""
        for name in self._names[first:] + self._names[:first]:
            try:
                with (self.directory(name) / _CLAIM).open("x", encoding="utf-8") as claim:
                    claim.write(who)
            except FileExistsError:
                continue
            return name
        return None

    def claimed(self, name: str) -> bool:
        return (self.directory(name) / _CLAIM).exists()

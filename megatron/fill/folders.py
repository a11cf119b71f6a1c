"""The parts of a run folder, and what belongs to a job in them.

A job has its own folder, ``RUN/jobs/NAME-NUMBER``, and nothing else of the run: what it prints and who locks its
folder lie beside, where it can neither replace nor open them.
"""

from __future__ import annotations

from pathlib import Path

JOBS = "jobs"
OUTPUT = "output"
LOCKS = "locks"
AGENTS = "agents"
RECORDS = "records"
CONTROL = "control"
RUN_LOCK = "run.lock"  # a training holds it
PARTS = (RECORDS, AGENTS, JOBS, OUTPUT, LOCKS, CONTROL)
PRIVATE = (AGENTS, LOCKS)  # nobody but the training's user has business there


def run_of(directory: Path) -> Path:
    """The run folder that a job's folder lies in."""
    return directory.parent.parent


def output_file(directory: Path, attempt: int | None = None) -> Path:
    """What a job printed.

    Args:
        directory: the job's folder.
        attempt: an earlier one; None for the latest.
    """
    number = "" if attempt is None else f".{attempt}"
    return run_of(directory) / OUTPUT / f"{directory.name}{number}.log"


def lock_file(directory: Path) -> Path:
    """The file whose lock means that a worker is in a job's folder; it is there once an agent has made that folder."""
    return run_of(directory) / LOCKS / directory.name

"""The parts of a run folder, and the files of a job in them.

A job has access to its own folder, ``RUN/jobs/NAME-NUMBER``, and to nothing else of the run: its output and its lock
file lie outside of it, where it can neither replace nor open them.
"""

from __future__ import annotations

from pathlib import Path

JOBS = "jobs"
OUTPUT = "output"
LOCKS = "locks"
AGENTS = "agents"
RECORDS = "records"
CONTROL = "control"
PLAN, PROFILE = "plan.json", "profile.json"  # in the job's folder, written by its worker
BETWEEN = "between"  # in a segment's folder: the records of what jobs did after it, until the next one
RUN_LOCK = "run.lock"  # locked by the training
PARTS = (RECORDS, AGENTS, JOBS, OUTPUT, LOCKS, CONTROL)
PRIVATE = (AGENTS, LOCKS)  # for the training's user only


def run_of(directory: Path) -> Path:
    """Return the run folder of a job's folder."""
    return directory.parent.parent


def output_file(directory: Path, attempt: int | None = None) -> Path:
    """Return the path of the output of a job's latest attempt, or of an earlier one by its number."""
    number = "" if attempt is None else f".{attempt}"
    return run_of(directory) / OUTPUT / f"{directory.name}{number}.log"


def lock_file(directory: Path) -> Path:
    """Return the path of the file that a worker in a job's folder locks; the agent creates it with that folder."""
    return run_of(directory) / LOCKS / directory.name

"""Jobs that a run has submitted to its store, so that a restart in the same folder does not submit them again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron.fill.errors import FillError
from megatron.fill.linux.files import write_text
from megatron.fill.store.port import NewJob

FILE = "submitted.json"  # in the run folder
_VERSION = 1


def not_yet_submitted(run_dir: Path, store: str, jobs: Sequence[NewJob]) -> list[NewJob]:
    """Return those of ``jobs`` that this run has not submitted to this store; jobs are equal if name and work are.

    Raises:
        FillError: the run's file of submitted jobs cannot be read.
    """
    known = set(_read(run_dir))
    return [job for job in jobs if _digest(store, job) not in known]


def note_submitted(run_dir: Path, store: str, jobs: Iterable[NewJob]) -> None:
    """Record that these jobs are in the store."""
    digests = list(dict.fromkeys([*_read(run_dir), *(_digest(store, job) for job in jobs)]))
    write_text(run_dir / FILE, json.dumps({"version": _VERSION, "jobs": digests}) + "\n")


def forget_submitted(run_dir: Path) -> None:
    """Delete the record, so that all jobs are submitted again."""
    (run_dir / FILE).unlink(missing_ok=True)


def _read(run_dir: Path) -> list[str]:
    path = run_dir / FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["version"] == _VERSION:
            return [str(digest) for digest in content["jobs"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise FillError(f"{path} is not what a run notes of the jobs that it submitted; expected it whole, or not there")


def _digest(store: str, job: NewJob) -> str:
    return hashlib.sha256(json.dumps([store, job.name, job.work.identity()]).encode()).hexdigest()

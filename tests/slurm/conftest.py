"""A private SLURM for the tests here, or a reason why there is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.cluster import NoSlurm, PrivateSlurm


def running_slurm(**options: Any) -> Iterator[PrivateSlurm]:
    """One SLURM for a fixture to yield from; the test is skipped where it cannot be run."""
    try:
        slurm = PrivateSlurm(**options).__enter__()
    except NoSlurm as error:
        pytest.skip(str(error))
    try:
        yield slurm
    finally:
        slurm.__exit__(None, None, None)


def output(place: Path, job: str) -> str:
    """What the job has printed, over all its starts."""
    path = place / f"pipefill-{job}.out"
    return path.read_text() if path.exists() else ""

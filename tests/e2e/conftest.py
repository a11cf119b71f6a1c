"""One warm process for all trainings of these tests."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def warm() -> Iterator[None]:
    """Ranks are forked from it; those that torchrun starts are not, and show that both are the same."""
    with tempfile.TemporaryDirectory(prefix="pipefill-") as folder:
        where = f"{folder}/warm"
        server = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("warm.py")), where],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.environ["PIPEFILL_TEST_WARM"] = where
        yield
        del os.environ["PIPEFILL_TEST_WARM"]
        server.kill()
        server.wait()

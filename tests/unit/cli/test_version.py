"""``pipefill --version`` says which code is used, and imports none of it that is slow."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SLOW = ("torch", "megatron.core", "sqlalchemy", "pydantic", "matplotlib")
RUN = f"""
import atexit, sys
from megatron.fill.cli import main
atexit.register(lambda: print([name for name in {SLOW} if name in sys.modules], file=sys.stderr))
main()
"""


def run(*before: Path) -> subprocess.CompletedProcess[str]:
    """The command, with these folders in front of all others."""
    path = os.pathsep.join(map(str, (*before, ROOT)))
    return subprocess.run(
        [sys.executable, "-c", RUN, "--version"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )


def test_the_versions_of_what_is_used():
    done = run()
    assert done.stdout.splitlines() == [
        f"pipefill {version('pipefill')}",
        f"megatron-core {version('megatron-core')}",
        f"torch {version('torch')}",
        f"Python {platform.python_version()}",
    ]
    assert done.stderr.strip() == "[]"


def test_a_checkout_in_front_of_pips_megatron_core_is_named(tmp_path):
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("raise ImportError", encoding="utf-8")
    (core / "package_info.py").write_text("__version__ = '0.21.0rc1+abcdef0'", encoding="utf-8")
    line = run(tmp_path).stdout.splitlines()[1]
    assert line == f"megatron-core 0.21.0rc1 in {core} (pip's is {version('megatron-core')})"

"""Pythons of their own for what changes modules for good.

They are forked from one that has imported torch, and nothing of Megatron: so they start in no time.
"""

from __future__ import annotations

import os
import subprocess
from tempfile import TemporaryFile

from tests.e2e.launch import FRESH, Warm


def python(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -W ignore ARGUMENTS...`` and wait for it."""
    with TemporaryFile("w+", encoding="utf-8") as output, TemporaryFile("w+", encoding="utf-8") as errors:
        descriptors = output.fileno(), errors.fileno()
        command = ["-W", "ignore", *arguments]
        child = Warm(command, os.environ | environ, os.environ[FRESH], descriptors)
        code = child.wait()
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(command, code, output.read(), errors.read())

"""Pythons of their own for what changes modules for good.

They are forked from one that has imported torch, and so start in no time; those for which Megatron need not be as new
are forked from one that has imported Megatron too, where the whole suite runs.
"""

from __future__ import annotations

import os
import subprocess
from tempfile import TemporaryFile

from tests.e2e.launch import FRESH, WARM, Warm


def python(*arguments: str, megatron: bool = False, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -W ignore ARGUMENTS...`` and wait for it.

    Args:
        megatron: it may have imported Megatron before it begins, with no patch; that takes 5 s.
    """
    with TemporaryFile("w+", encoding="utf-8") as output, TemporaryFile("w+", encoding="utf-8") as errors:
        descriptors = output.fileno(), errors.fileno()
        command = ["-W", "ignore", *arguments]
        where = os.environ.get(WARM) if megatron else None
        child = Warm(command, os.environ | environ, where or os.environ[FRESH], descriptors)
        code = child.wait()
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(command, code, output.read(), errors.read())

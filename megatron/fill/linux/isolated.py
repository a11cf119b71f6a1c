"""Processes of Python that nothing but their starter has a say in: no variable, and no folder that they start in."""

from __future__ import annotations

import json
import sys

_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {} import main; main(*sys.argv[2:])"


def program(module: str, *arguments: str) -> list[str]:
    """The command that calls a module's ``main`` with these texts.

    It finds its modules where this process does.
    """
    return [sys.executable, "-I", "-c", _START.format(module), json.dumps(sys.path), *arguments]

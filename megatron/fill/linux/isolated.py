"""Python processes that neither environment variables nor their working folder influence."""

from __future__ import annotations

import json
import sys

_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {} import main; main(*sys.argv[2:])"


def program(module: str, *arguments: str) -> list[str]:
    """The command line that calls a module's ``main`` with ``arguments``, with the ``sys.path`` of this process."""
    return [sys.executable, "-I", "-c", _START.format(module), json.dumps(sys.path), *arguments]

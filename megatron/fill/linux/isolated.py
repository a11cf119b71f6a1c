"""Python processes that neither environment variables nor their working folder influence."""

from __future__ import annotations

import json
import subprocess
import sys

_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {} import main; main(*sys.argv[2:])"


def program(module: str, *arguments: str) -> list[str]:
    """The command line that calls a module's ``main`` with ``arguments``, with the ``sys.path`` of this process."""
    return [sys.executable, "-I", "-c", _START.format(module), json.dumps(sys.path), *arguments]


def ask(module: str, argument: str, timeout_s: float) -> str:
    """Call a module's ``main`` in a process of its own; return what it prints.

    TimeoutError after ``timeout_s`` seconds; OSError if it ends with an error, whose last line is the message.
    """
    line = program(module, argument)
    try:
        done = subprocess.run(
            line, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"it does not end within {timeout_s:.0f} s") from error
    if done.returncode:
        raise OSError((done.stderr.strip().splitlines() or [f"the attempt ended with {done.returncode}"])[-1])
    return done.stdout

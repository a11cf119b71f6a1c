"""The end of a process that a task has forked, where it leaves the task's own code."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from megatron.fill.sidetask.blame import task_traceback


def end_forked(callback: str) -> NoReturn:
    """End this process, which ``callback`` has forked, with the status of the exception that is being handled, if any.

    ``sys.exit()`` ends it as it would end any other; anything else is explained in the job's output.
    """
    error, status = sys.exception(), 1
    if isinstance(error, SystemExit):
        status = 0 if error.code is None else error.code if isinstance(error.code, int) else 1
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    elif error is not None:
        print(task_traceback(error), end="", file=sys.stderr)
    else:
        print(
            f"{callback}() came back in a process that it had forked, too: that one is ended, and its work does not "
            "count; expected os._exit() in it",
            file=sys.stderr,
        )
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF)

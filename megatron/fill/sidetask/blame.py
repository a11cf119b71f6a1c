"""The failure of a task in its author's words: its traceback, and the end of a process that it has forked."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import NoReturn

from megatron.fill.errors import FillError, TaskError
from megatron.fill.sidetask.base import SideTask

_PACKAGE = f"{Path(__file__).parents[1]}/"
_IMPORTING = ("<frozen importlib.", "/importlib/__init__.py")


class PrintedError(TaskError):
    """A failure in another process of the task, which has printed its traceback."""


def task_traceback(error: BaseException) -> str:
    """The traceback without the frames that call the task; the whole traceback if it has no other frames.

    For an error of PipeFill with a cause, it is that of the cause, since the message is reported separately.
    """
    if isinstance(error, PrintedError):
        return ""
    if isinstance(error, FillError) and error.__cause__ is not None:
        error = error.__cause__
    whole = traceback.TracebackException.from_exception(error, compact=True)
    shown: traceback.TracebackException | None = whole
    raised: BaseException | None = error
    while shown is not None and raised is not None:
        frames = [frame for frame, _ in traceback.walk_tb(raised.__traceback__)]
        first = next((at for at, frame in enumerate(frames) if not _calls_tasks(frame)), 0)
        shown.stack[:] = shown.stack[first:]
        cause = shown.__cause__
        shown = cause or shown.__context__
        raised = raised.__cause__ if cause is not None else raised.__context__
    return "".join(whole.format())


def _calls_tasks(frame: FrameType) -> bool:
    """True if the frame is code of the package or of Python's import, and not of a task (the package has some too)."""
    file = frame.f_code.co_filename
    if file.startswith(_IMPORTING[0]) or file.endswith(_IMPORTING[1]):
        return True
    return file.startswith(_PACKAGE) and not isinstance(frame.f_locals.get("self"), SideTask)


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

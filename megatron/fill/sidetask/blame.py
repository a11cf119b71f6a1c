"""The traceback of a task's failure, starting at the first frame of the author's code."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import FrameType

from megatron.fill.errors import FillError
from megatron.fill.sidetask.base import SideTask

_PACKAGE = f"{Path(__file__).parents[1]}/"
_IMPORTING = ("<frozen importlib.", "/importlib/__init__.py")


def task_traceback(error: BaseException) -> str:
    """The traceback without the frames that call the task; the whole traceback if it has no other frames.

    For an error of PipeFill with a cause, it is that of the cause, since the message is reported separately.
    """
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

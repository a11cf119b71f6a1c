"""A failure as the task's author wants to see it: from where their own code begins."""

from __future__ import annotations

import traceback
from pathlib import Path

from megatron.fill.errors import FillError
from megatron.fill.sidetask import loader, machine

_FILL = Path(__file__).parents[1]
_CALLERS = (f"{_FILL / 'runtime'}/", f"{_FILL / 'app'}/", machine.__file__, loader.__file__, "<frozen importlib.")
_IMPORT = "/importlib/__init__.py"


def task_traceback(error: BaseException) -> str:
    """The traceback without the callers of the task; whole where nothing but those is in it.

    An error of our own is told by its message; what is shown of it is what it came from.
    """
    if isinstance(error, FillError) and error.__cause__ is not None:
        error = error.__cause__
    whole = traceback.TracebackException.from_exception(error, compact=True)
    one: traceback.TracebackException | None = whole
    while one is not None:
        own = _below_callers(one.stack)
        if own:
            one.stack[:] = own
        one = one.__cause__ or one.__context__
    return "".join(whole.format())


def _below_callers(stack: traceback.StackSummary) -> list[traceback.FrameSummary]:
    at = 0
    while at < len(stack) and (stack[at].filename.startswith(_CALLERS) or stack[at].filename.endswith(_IMPORT)):
        at += 1
    return stack[at:]

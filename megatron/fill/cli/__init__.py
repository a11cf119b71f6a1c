"""The ``pipefill`` command."""

from __future__ import annotations

import io
import sys
from typing import Any, NoReturn

from megatron.fill.display import never_fail_to_print
from megatron.fill.errors import FillError


def main() -> None:
    """Run the command line, and exit with the command's status: 2 after an error (of one line), 130 if interrupted."""
    from typer import Abort, TyperException

    from megatron.fill.cli.app import app

    if sys.stdout is None:  # closed, as some batch systems leave it
        sys.stdout = io.StringIO()
    never_fail_to_print()
    if "" in sys.argv[1:]:  # from a shell variable that is not set
        _fail(f"argument {sys.argv.index('', 1)} is empty; expected a value")
    try:
        status = app(sys.argv[1:] or ["--help"], prog_name="pipefill", standalone_mode=False)
    except (FillError, TyperException) as error:
        from megatron.fill.given.problems import reworded

        if isinstance(error, TyperException):
            _fail(reworded(error.format_message()) + _belongs(error))
        _fail(str(error))
    except OSError as error:
        from megatron.fill.given.problems import shown

        _fail(f"{shown(error.filename)}: {error.strerror}" if error.filename else str(error))
    except Abort:
        sys.exit(130)
    sys.exit(status)


def _belongs(error: Any) -> str:
    """Return the end of the message on an unknown option of a command that takes Megatron's flags after ``--``."""
    unknown = getattr(error, "possibilities", True) in (None, [])  # none is named that may have been meant
    after = unknown and any((one.metavar or "").startswith("-- ") for one in error.ctx.command.params)
    return "; Megatron's flags come after --" if after else ""


def _fail(message: str) -> NoReturn:
    print(f"pipefill: error: {message}", file=sys.stderr)
    sys.exit(2)

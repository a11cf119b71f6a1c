"""The ``pipefill`` command."""

from __future__ import annotations

import sys

from megatron.fill.errors import FillError


def main() -> None:
    """Run the command line; exits with 0, 2 (and one line that says why) or, interrupted, 130."""
    from typer import Abort, TyperException

    from megatron.fill.cli.app import app

    try:
        status = app(sys.argv[1:] or ["--help"], prog_name="pipefill", standalone_mode=False)
    except (FillError, TyperException) as error:
        message = error.format_message() if isinstance(error, TyperException) else str(error)
        print(f"pipefill: error: {message}", file=sys.stderr)
        sys.exit(2)
    except Abort:
        sys.exit(130)
    sys.exit(status)

"""``python -m pipefill_patches [--only PATCH,...] SCRIPT ARGS...``: run an unchanged Megatron script, patched."""

from __future__ import annotations

import os
import runpy
import sys

from pipefill_patches import PATCHES

_USAGE = f"""usage: python -m pipefill_patches [--only PATCH,...] SCRIPT ARGS...

Runs a Megatron-LM training script with PipeFill's patches applied and the --fill-* flags available.

  --only PATCH,...   apply just these patches: {", ".join(PATCHES)}
"""


def main() -> None:
    arguments = sys.argv[1:]
    only = None
    if arguments[:1] == ["--only"] and len(arguments) > 1:
        only = tuple(arguments[1].split(","))
        arguments = arguments[2:]
    if not arguments or arguments[0].startswith("-"):
        print(_USAGE, end="", file=sys.stdout if arguments[:1] in (["-h"], ["--help"]) else sys.stderr)
        sys.exit(0 if arguments[:1] in (["-h"], ["--help"]) else 2)
    script = arguments[0]
    if not os.path.isfile(script):
        print(f"pipefill_patches: error: no such script: {script}", file=sys.stderr)
        sys.exit(2)
    from megatron.fill.app.launch import launch

    sys.argv = arguments
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    launch(lambda: runpy.run_path(script, run_name="__main__"), only)


if __name__ == "__main__":
    main()

"""``python -m pipefill_patches [--only PATCH,...] SCRIPT ARGS...``: run an unchanged Megatron script, patched.

``python -m pipefill_patches --check`` prints which patches fit the imported megatron-core.
"""

from __future__ import annotations

import os
import runpy
import sys

from megatron.fill.errors import PatchError
from pipefill_patches import PATCHES
from pipefill_patches.patch import upstream

_USAGE = f"""usage: python -m pipefill_patches [--only PATCH,...] SCRIPT ARGS...
       python -m pipefill_patches --check

Runs a Megatron-LM training script with PipeFill's patches applied and the --fill-* flags available.

  --only PATCH,...   apply just these patches: {", ".join(PATCHES)}
  --check            say which patches fit the megatron-core that is imported; exits with 1 where one does not
"""


def check() -> int:
    """Print for each patch that it fits, or why it does not; return the number of those that do not."""
    try:
        print(f"{upstream()}:")
    except PatchError as error:
        print(f"pipefill_patches: error: {error}", file=sys.stderr)
        sys.exit(2)
    misfits = 0
    for patch in PATCHES.values():
        try:
            patch.check()
            print(f"  {patch.name}: fits")
        except PatchError as error:
            misfits += 1
            print(f"  {patch.name}: {error}")
    return misfits


def main() -> None:
    arguments = sys.argv[1:]
    only = None
    if arguments == ["--check"]:
        sys.exit(check() > 0)
    if arguments[:1] == ["--only"] and len(arguments) > 1:
        only = tuple(arguments[1].split(","))
        arguments = arguments[2:]
    if not arguments or arguments[0].startswith("-"):
        print(_USAGE, end="", file=sys.stdout if arguments[:1] in (["-h"], ["--help"]) else sys.stderr)
        sys.exit(0 if arguments[:1] in (["-h"], ["--help"]) else 2)
    run(arguments, only)


def run(arguments: list[str], only: tuple[str, ...] | None = None) -> None:
    """Run a script, given by its path and its own arguments, with the patches applied: all that apply here, or ``only``
    some.
    """
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

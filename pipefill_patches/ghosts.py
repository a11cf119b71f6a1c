"""``python -m pipefill_patches.ghosts --stage N SCRIPT ARGS...``: train one stage of a pipeline alone on one device."""

from __future__ import annotations

import pipefill_patches
from pipefill_patches import ghost_flags, ghost_stages
from pipefill_patches.__main__ import run


def main() -> None:
    options = ghost_flags.ghost_parser().parse_args()
    ghost_flags.requested = options
    pipefill_patches.add(ghost_stages.PATCH, before="arguments")
    run([options.script, *options.arguments])


if __name__ == "__main__":
    main()

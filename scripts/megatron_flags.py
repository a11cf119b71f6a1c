"""Write Megatron's flags with the values that its parser takes; ``pipefill configure`` knows them without torch.

python scripts/megatron_flags.py    # in the environment of the newest megatron-core; adds to what other versions gave

A line is a flag; then, if it takes a value, ``int``, ``float``, ``str``, or its choices with ``|`` between them; then
``+`` if it takes several, or ``*`` if it may also have none.
"""

from __future__ import annotations

import argparse
from enum import Enum
from pathlib import Path

from megatron.training.arguments import add_megatron_arguments

PATH = Path(__file__).resolve().parents[1] / "megatron/fill/wings/configure/megatron_flags.txt"


def lines() -> dict[str, str]:
    """The lines of the installed Megatron's flags, by flag."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    return {
        name: " ".join((name, *_taken(action)))
        for name, action in parser._option_string_actions.items()
        if name.startswith("--")
    }


def _taken(action: argparse.Action) -> list[str]:
    if action.nargs == 0:
        return []
    if action.choices is not None:
        kind = "|".join(one.name if isinstance(one, Enum) else str(one) for one in action.choices)
    else:
        kind = action.type.__name__ if action.type in (int, float) else "str"
    return [kind] if action.nargs is None else [kind, "*" if action.nargs == "*" else "+"]


def main() -> None:
    kept = {line.split()[0]: line for line in PATH.read_text(encoding="utf-8").splitlines()} if PATH.exists() else {}
    PATH.write_text("\n".join(line for _, line in sorted((kept | lines()).items())) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

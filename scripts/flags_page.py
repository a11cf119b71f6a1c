"""Write docs/flags.md, the page of PipeFill's flags, from the settings that ``--help`` is made of.

python scripts/flags_page.py
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pipefill_patches.arguments import add_fill_arguments  # noqa: E402
from pipefill_patches.ghost_flags import add_ghost_arguments  # noqa: E402

PAGE = ROOT / "docs" / "flags.md"
HEAD = """# Flags

All flags that PipeFill adds to Megatron's, as `pretrain_gpt.py --help` shows them; only `--fill-jobs FILE` is needed.
This page is made by `python scripts/flags_page.py`.
"""


def page() -> str:
    """The page's text."""
    parser = argparse.ArgumentParser(add_help=False)
    add_ghost_arguments(add_fill_arguments(parser))
    parts = [HEAD]
    for group in parser._action_groups:
        if group._group_actions:
            rows = [f"| `{_usage(action)}` | {_help(parser, action)} |" for action in group._group_actions]
            parts.append("\n".join([f"## {_title(group)}\n", "| flag | |", "| --- | --- |", *rows, ""]))
    return "\n".join(parts)


def _title(group: argparse._ArgumentGroup) -> str:
    return (group.description or group.title or "").removesuffix(" (PipeFill)").capitalize()


def _usage(action: argparse.Action) -> str:
    flag = action.option_strings[0]
    if action.nargs == 0:
        return flag
    value = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.metavar
    return f"{flag} {value}{'...' if action.nargs == '+' else ''}".replace("|", "\\|")


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    text = argparse.HelpFormatter(parser.prog)._expand_help(action)
    return re.sub(r"(?<![\w`-])(--[\w-]+)", r"`\1`", text).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

"""Write docs/flags.md, the page of PipeFill's flags, from the settings that ``--help`` is made of.

python scripts/flags_page.py
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from pydantic.fields import FieldInfo

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.fill.given.settings import SiteSettings  # noqa: E402
from pipefill_patches.arguments import add_fill_arguments  # noqa: E402

PAGE = ROOT / "docs" / "flags.md"
HEAD = """# Flags

All flags that PipeFill adds to Megatron's, as `pretrain_gpt.py --help` shows them. `--fill-jobs FILE` is enough to
fill, `--fill-profile-only` to measure bubbles without jobs. This page is made by `python scripts/flags_page.py`.
"""
SETTINGS = """## Settings

The rest is in the YAML of `--fill-settings`: what a site decides once for all its runs, limits, and what PipeFill
chooses well by itself. A site keeps them in a file, which its launch scripts name (`--fill-settings site.yaml`).
They are defaults, not enforcement: a second `--fill-settings` after that, such as `--fill-settings more.yaml`,
changes them for one run. An unknown name or a wrong value ends the run before it starts; so does `user`
where the training is not root's and `user` is another than its own.

```yaml
user: fill            # its files are all that jobs can read
allow: [ourlab.tasks.*, megatron.fill.sidetask.*]
max_processes: 64
price: {main: 30, side: 0.5}
```

| setting | default | |
| --- | --- | --- |
"""


def page() -> str:
    """The page's text."""
    parser = argparse.ArgumentParser(add_help=False)
    add_fill_arguments(parser)
    parts = [HEAD]
    for group in parser._action_groups:
        if group._group_actions:
            rows = [f"| `{_usage(action)}` | {_help(parser, action)} |" for action in group._group_actions]
            parts.append("\n".join([f"## {_title(group)}\n", "| flag | |", "| --- | --- |", *rows, ""]))
    rows = [f"| `{name}` | {_default(field)} | {_marked(field.description)} |" for name, field in _settings()]
    return "\n".join([*parts, SETTINGS + "\n".join(rows), ""])


def _settings() -> list[tuple[str, FieldInfo]]:
    return list(SiteSettings.model_fields.items())


def _default(field: FieldInfo) -> str:
    value = field.default
    return "" if value in (None, ()) else f"`{str(value).lower() if isinstance(value, bool) else format(value, 'g')}`"


def _title(group: argparse._ArgumentGroup) -> str:
    return (group.description or group.title or "").removesuffix(" (PipeFill)").capitalize()


def _usage(action: argparse.Action) -> str:
    flag = action.option_strings[0]
    if action.nargs == 0:
        return flag
    value = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.metavar
    return f"{flag} {value}{'...' if action.nargs == '+' else ''}".replace("|", "\\|")


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    return _marked(argparse.HelpFormatter(parser.prog)._expand_help(action))


def _marked(text: str | None) -> str:
    return re.sub(r"(?<![\w`-])(--[\w-]+)", r"`\1`", text or "").replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

"""Write the names of Megatron's flags, which ``pipefill configure`` then knows without importing torch.

python scripts/megatron_flags.py    # in the environment of the newest megatron-core; adds to what other versions gave
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron.training.arguments import add_megatron_arguments

PATH = Path(__file__).resolve().parents[1] / "megatron/fill/wings/configure/megatron_flags.txt"


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    names = {name for name in parser._option_string_actions if name.startswith("--")}
    if PATH.exists():
        names |= set(PATH.read_text(encoding="utf-8").split())
    PATH.write_text("\n".join(sorted(names)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

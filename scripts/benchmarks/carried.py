"""What to carry to a machine without network so that PipeFill runs there beside its torch, as NAME==VERSION lines.

It follows the declared requirements of the PipeFill that is installed here, and takes the versions that are installed
here, which are those that were tested.  It goes no further than what such a machine has (torch, numpy and transformers
with all that they need), and leaves out the extras of other packages: Megatron guards its imports of those.

    python scripts/benchmarks/carried.py [--extras tasks] [--has FREEZE.txt]

``--has`` names a file as ``pip list --format=freeze`` prints it on that machine: what is there in a version that fits
is left out.  Exit code: 2 for a wrong flag or file, or if something is not installed here.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

THERE = frozenset({"torch", "numpy", "transformers"})
TARGET = {
    "python_version": "3.12",
    "python_full_version": "3.12.0",
    "sys_platform": "linux",
    "platform_system": "Linux",
}
EXTRAS = ("tasks", "models", "postgres")


def carried(extras: list[str], has: Mapping[str, str]) -> dict[str, str]:
    """The packages to carry, each with its version; PipeFill itself is not among them.

    Args:
        extras: of PipeFill.
        has: what the machine has, by its canonical name.

    Raises:
        PackageNotFoundError: something is not installed here.
    """
    found: dict[str, str] = {}
    waiting = deque(_required("pipefill", ["", *extras]))
    while waiting:
        needed = waiting.popleft()
        name = canonicalize_name(needed.name)
        if name in THERE or name in found:
            continue
        if name in has and needed.specifier.contains(has[name], prereleases=True):
            continue
        found[name] = version(name)
        waiting += _required(name, [""])
    return found


def _required(package: str, extras: list[str]) -> list[Requirement]:
    asked = [Requirement(line) for line in requires(package) or []]
    return [
        one
        for one in asked
        if one.marker is None or any(one.marker.evaluate(TARGET | {"extra": extra}) for extra in extras)
    ]


def read_freeze(path: Path) -> dict[str, str]:
    """What ``pip list --format=freeze`` printed.

    Raises:
        ValueError: it printed something else.
        OSError: the file cannot be read.
    """
    found: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").split():
        name, equal, number = line.partition("==")
        if not equal:
            raise ValueError(f"{line!r}: expected NAME==VERSION, as pip list --format=freeze prints it")
        found[canonicalize_name(name)] = number
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extras", nargs="+", choices=EXTRAS, default=[], help="of PipeFill (default: none)")
    parser.add_argument("--has", metavar="FILE", type=Path, help="what the machine has")
    options = parser.parse_args()
    try:
        has = {} if options.has is None else read_freeze(options.has)
    except (OSError, ValueError) as error:
        parser.error(f"argument --has: {options.has}: {getattr(error, 'strerror', None) or error}")
    try:
        for name, number in sorted(carried(options.extras, has).items()):
            print(f"{name}=={number.partition('+')[0]}")
    except PackageNotFoundError as error:
        parser.error(f"{error.name} is not installed here; expected what scripts/setup.sh installs")


if __name__ == "__main__":
    main()

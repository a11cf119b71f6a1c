"""Runs a training script in a Python of its own that rests after each iteration, and invents data, as warm ones do.

    python rested.py SCRIPT FLAGS...

The jobs of a training that does not rest start in its bubbles alone, so later.
"""

from __future__ import annotations

import os
import runpy
import sys

from tests.e2e.warm import REST, invent, rest


def main() -> None:
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    invent()
    rest(float(os.environ[REST]) / 1e3)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()

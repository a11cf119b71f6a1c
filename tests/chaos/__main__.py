"""Train a small GPT under injected faults, and compare its losses with a training that had no jobs.

Takes two cores for about a second per fault.  Exits with 0 if all faults were injected, every loss is the same to the
bit, no training failed, stood still or was slowed, no job was lost and no process was left, and every attack was tried
and has succeeded without the isolation layers that stop it; else with 1.  See docs/chaos.md.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from megatron.fill.cli.options import check_writable
from megatron.fill.errors import FillError
from tests.chaos.checkout import SCRIPT
from tests.chaos.mainjob import LEAST
from tests.chaos.printed import print_controls, print_result
from tests.chaos.run import ChaosOptions, control, run

_PROGRAM = ("python", "-m", "tests.chaos")


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code.

    Raises:
        SystemExit: an option is wrong, or the training does not run; with 2, after an error of one line.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        check_writable(json=options.json)
        names = () if options.kinds is None else tuple(name.strip() for name in options.kinds.split(","))
        if options.controls:
            return _control(names, options.json)
        return _run(
            ChaosOptions(options.faults, names, options.seed, options.keep, options.iterations, options.script),
            options.json,
            shlex.join([*_PROGRAM, *arguments]),
        )
    except FillError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=shlex.join(_PROGRAM),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--faults", "-n", type=_at_least(1), default=1000, metavar="N", help="number of faults (default: 1000)")
    add("--json", type=Path, metavar="FILE", help="write the outcome here, as JSON")
    add("--kinds", metavar="A,B,...", help="inject these kinds only (docs/chaos.md lists them)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the order of the faults (default: 0)")
    add("--keep", type=Path, metavar="FOLDER", help="keep logs, run folders and job store in this new folder")
    add(
        "--iterations",
        type=_at_least(LEAST),
        metavar="N",
        help="iterations of each training (default: 500, or 1200 for many faults)",
    )
    add("--controls", action="store_true", help="run only the controls: each attack must succeed without its walls")
    add("--script", type=Path, default=SCRIPT, metavar="PATH", help="training script (default: pretrain_gpt.py)")
    return parser


def _at_least(least: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least {least}")
        return int(text)

    return convert


def _control(names: tuple[str, ...], output: Path | None) -> int:
    found = control(names, _progress())
    print_controls(found, Console())
    if output is not None:
        output.write_text(json.dumps([asdict(one) for one in found], indent=2) + "\n", encoding="utf-8")
    return int(any(one.wrong and not one.impossible for one in found))


def _run(options: ChaosOptions, output: Path | None, command: str) -> int:
    result = run(options, _progress())
    print_result(result, Console())
    if output is not None:
        output.write_text(json.dumps(result.as_dict(command), indent=2) + "\n", encoding="utf-8")
    return int(not result.passed)


def _progress() -> Callable[[str], None]:
    """A function that prints a line to standard error, with the time since now."""
    began_s = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began_s:6.0f} s  {line}", file=sys.stderr, flush=True)

    return say


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What all benchmarks share: their arguments, and the JSON file, to which calls for single parts add."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from megatron.fill.linux.files import write_text


class Results:
    """What was measured, of earlier calls too: each part's command, its place in the summary, and its details.

    Args:
        path: the file; None to keep none.

    Raises:
        OSError: it cannot be read, or nothing can be written there.
        ValueError: it holds something else.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.commands: dict[str, str] = {}
        self.summary: dict[str, Any] = {}
        self.details: dict[str, Any] = {}
        if path is None:
            return
        with path.open("a+", encoding="utf-8") as file:
            file.seek(0)
            text = file.read()
        if text:
            found = json.loads(text)
            names = ("commands", "summary", "details")
            if not (isinstance(found, dict) and all(isinstance(found.get(name), dict) for name in names)):
                raise ValueError("it holds something else than the figures of such a call")
            self.commands, self.summary, self.details = (found[name] for name in names)

    def add(self, part: str, figures: dict[str, Any], *where: str, **details: Any) -> None:
        """Add a part's figures at the end of a path of keys in the summary; what others have there stays."""
        place = self.summary
        for key in where:
            place = place.setdefault(key, {})
        place.update(figures)
        self.commands[part] = command()
        if details:
            self.details[part] = details
        self.write()

    def write(self) -> None:
        """Write all of it down."""
        if self._path is None:
            return
        content = {"commands": self.commands, "summary": self.summary, "details": self.details}
        write_text(self._path, json.dumps(content, indent=2) + "\n")  # a call may be killed while it writes


PIPEFILL = [sys.executable, "-c", "from megatron.fill.cli import main; main()"]


def pipefill(*words: str) -> str:
    """Run the command; return what it prints."""
    return subprocess.run([*PIPEFILL, *words], stdout=subprocess.PIPE, text=True, check=True).stdout


def command() -> str:
    """The call of this program, as one types it in the root of the checkout."""
    return " ".join(["python", f"scripts/benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])


def write_figures(path: Path | None, summary: dict[str, Any], **details: Any) -> None:
    """Print the figures of a benchmark that has one part; write them over a file's, if there is one, with details."""
    print(json.dumps(summary, indent=2))
    if path is not None:
        write_text(path, json.dumps({"command": command(), "summary": summary, **details}, indent=2) + "\n")


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """The parser of a benchmark, with ``--json``; the module's docstring is its help."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures here")
    return parser


def opened(parser: argparse.ArgumentParser, path: Path | None) -> Results:
    """The results of ``--json``; a file that cannot be one ends the program as a wrong flag does."""
    try:
        return Results(path)
    except (OSError, ValueError) as error:
        parser.error(f"--json {path}: {error}; expected a new file, or one that was written by --json")


def check_above_zero(parser: argparse.ArgumentParser, options: argparse.Namespace, *names: str) -> None:
    """End the program, as a wrong flag does, unless all these numbers are above 0."""
    for name in names:
        if not getattr(options, name) > 0:
            parser.error(f"argument --{name.replace('_', '-')}: {getattr(options, name)}: expected above 0")

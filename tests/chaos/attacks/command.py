"""PipeFill's own commands, as an operator calls them, with hostile files and stores."""

from __future__ import annotations

import os
import resource
import shutil
import sqlite3
import subprocess
import sys
import unicodedata
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.checkout import ROOT

_PATIENCE_S = 40.0
_MEMORY = 2 << 30
_ENTRY = "from megatron.fill.cli import main; main()"
_NOBODY = 65534


@dataclass(frozen=True, slots=True)
class Said:
    """The result of a command; ``code`` is None if it did not end in time."""

    code: int | None
    output: str
    errors: str

    @property
    def fault(self) -> str:
        """The fault in that result for a command with bad input; ``""`` if it answered with an error of one line."""
        if self.code is None:
            return "it did not end"
        if "Traceback" in self.errors or self.code not in (0, 1, 2):
            return f"it failed with {self.code}: {self.errors.strip().splitlines()[-1:]}"
        return ""


def pipefill(*arguments: str, nobody: bool = False) -> Said:
    """Call the command with limited memory and time."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))

    try:
        done = subprocess.run(
            [sys.executable, "-c", _ENTRY, *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=_PATIENCE_S,
            preexec_fn=limit,
            user=_NOBODY if nobody and os.geteuid() == 0 else None,
        )
    except subprocess.TimeoutExpired:
        return Said(None, "", "")
    except PermissionError:  # the interpreter itself is closed to that user
        return Said(0, "", "")
    return Said(done.returncode, done.stdout, done.stderr)


def controls(text: str) -> list[str]:
    """The characters in an output that a terminal acts on."""
    return sorted({repr(one) for one in text if unicodedata.category(one) in ("Cc", "Cf") and one not in "\n\t"})


BOMBS = {
    "aliases": "a: &a [x,x,x,x,x,x,x,x,x]\n"
    + "".join(f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join(['*' + chr(97 + n)] * 9)}]\n" for n in range(9))
    + "jobs:\n  - {name: bomb, task: 'a:B', args: {x: *j}}\n",
    "itself": "jobs:\n  - &a {name: bomb, task: 'a:B', args: {x: [*a]}}\n",
    "deep": "jobs: " + "[" * 20_000,
    "deep-args": "jobs:\n  - {name: bomb, task: 'a:B', args: {x: " + "[" * 900 + "]" * 900 + "}}\n",
    "object": "jobs: !!python/object/apply:os.mkdir [bomb]\n",
    "digits": "jobs:\n  - {name: bomb, task: 'a:B', args: {x: " + "9" * 100_000 + "}}\n",
    "count": "jobs:\n  - {name: bomb, task: 'a:B', count: 999999999}\n",
}


def bomb_faults(folder: Path) -> list[str]:
    """Submit each bomb to a store of its own; return the faults in the answers."""
    found = []
    for name, text in BOMBS.items():
        path = folder / f"{name}.yaml"
        path.write_text(text, encoding="utf-8")
        said = pipefill("submit", str(path), "--store", str(folder / f"{name}.db"))
        if said.fault:
            found.append(f"{name}: {said.fault}")
    return found


def store_faults(database: Path, folder: Path) -> list[str]:
    """List the jobs of damaged copies of a store; return the faults in the answers."""
    copies = {name: folder / f"{name}.db" for name in ("truncated", "empty", "noise", "future", "read-only", "folder")}
    for name, path in copies.items():
        damage(database, path, name)
    found = []
    for name, path in copies.items():
        for command in ("list", "devices") if name == "read-only" else ("list",):
            said = pipefill(command, "--store", str(path), nobody=name == "read-only")
            if said.fault:
                found.append(f"{name}: {said.fault}")
    return found


def damage(database: Path, path: Path, how: str) -> None:
    """Copy a store, and damage the copy in one way."""
    if how == "folder":
        path.mkdir()
        return
    with closing(sqlite3.connect(database)) as source, closing(sqlite3.connect(path)) as copy:
        source.backup(copy)
        if how == "future":
            copy.execute("UPDATE pipefill_schema SET version_num = 'v9999'")
            copy.commit()
        copy.execute("PRAGMA journal_mode=DELETE")
    match how:
        case "truncated":
            os.truncate(path, path.stat().st_size // 2)
        case "empty":
            os.truncate(path, 0)
        case "noise":
            path.write_bytes(os.urandom(path.stat().st_size))
        case "read-only":
            path.chmod(0o444)


def clear(folder: Path) -> None:
    """Remove the created files."""
    shutil.rmtree(folder, ignore_errors=True)

"""Things that a job brings along: an environment whose code would run before the sandbox, and commands.

Each kind is a function that creates what the job needs in a folder of its own, and returns its part of the job:
``env``, or ``command``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.fill.types import JobState
from tests.chaos.checkout import ROOT
from tests.chaos.kind import FaultKind, Source

# Notes the privileges of this program, as the kernel reports them: held if it has none over others.
_NOTE = """\
def _note():
    import os, time  # and not json, which may be one of its own here

    with open("/proc/self/status") as file:
        status = dict(line.rstrip("\\n").split(":\\t", 1) for line in file if ":\\t" in line)
    powers = {{name: status.get(name, "") for name in ("Uid", "CapEff", "NoNewPrivs", "Seccomp")}}
    held = not int(powers["CapEff"], 16) and powers["NoNewPrivs"] == "1" and powers["Seccomp"] == "2"
    for event in ("fault", "held" if held else "through"):
        detail = " ".join(str(powers).replace("\\\\t", " ").split())
        texts = [f'"{{name}}": "{{word}}"' for name, word in (("event", event), ("detail", detail))]
        numbers = [f'"{{name}}": {{word}}' for name, word in (("at_ns", time.monotonic_ns()), ("pid", os.getpid()))]
        line = "{{" + ", ".join(texts + numbers) + "}}"
        fd = os.open({marks!r}, os.O_WRONLY | os.O_APPEND)
        os.write(fd, (line + "\\n").encode())
        os.close(fd)


try:
    _note()
except OSError:
    pass
"""
_PROGRAMS = (
    "chrt",
    "python",
    "python3",
    "env",
    "nice",
    "ionice",
    "taskset",
    "setsid",
    "sh",
    "mount",
    "unshare",
    "bwrap",
    "setpriv",
    "true",
    "newuidmap",
    "newgidmap",
)
_PASS_ON = """\
import os, shutil, sys

_path = shutil.which(os.path.basename(sys.argv[0]), path=os.defpath + ":/usr/sbin:/sbin")
os.execv(_path or sys.executable, sys.argv)
"""
_FAULT = (
    "import sys; sys.path.insert(0, {root!r}); from tests.chaos.attacks.daemons import {name} as run; run({marks!r})"
)


def _write(folder: Path, name: str, text: str, mode: int = 0o644) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")
    (folder / name).chmod(mode)


def _python_path(folder: Path, marks: Path) -> dict[str, Any]:
    for name in ("sitecustomize.py", "usercustomize.py"):
        _write(folder, name, _NOTE.format(marks=str(marks)))
    return {"env": {"PYTHONPATH": str(folder)}}


def _path(folder: Path, marks: Path) -> dict[str, Any]:
    for name in _PROGRAMS:
        _write(folder, name, f"#!{sys.executable} -ISE\n" + _NOTE.format(marks=str(marks)) + _PASS_ON, 0o755)
    return {"env": {"PATH": str(folder)}}


def _shadow(folder: Path, marks: Path) -> dict[str, Any]:
    """Modules with names of the standard library, in place of those that the worker imports."""
    for name in ("json", "logging", "torch", "numpy", "contextlib", "signal"):
        _write(folder, f"{name}.py", _NOTE.format(marks=str(marks)) + "raise ImportError('shadowed')\n")
    return {"env": {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": ""}}


def _interpreter(folder: Path, marks: Path) -> dict[str, Any]:
    """Settings with which the interpreter does not even start."""
    return {
        "env": {
            "PYTHONHOME": "/nowhere",
            "PYTHONINSPECT": "1",
            "PYTHONWARNINGS": "error",
            "PYTHONDUMPREFS": "1",
            "PYTHONMALLOC": "debug",
            "PYTHONUTF8": "0",
            "PYTHONPLATLIBDIR": "nowhere",
        }
    }


def _loader(folder: Path, marks: Path) -> dict[str, Any]:
    """Settings of the dynamic loader and the C library."""
    return {
        "env": {
            "LD_PRELOAD": "libm.so.6",
            "LD_DEBUG": "files",
            "LD_DEBUG_OUTPUT": str(folder / "loader"),
            "LD_AUDIT": "/nowhere.so",
            "LD_LIBRARY_PATH": str(folder),
            "GCONV_PATH": str(folder),
            "LD_BIND_NOW": "1",
        }
    }


def _limits(folder: Path, marks: Path) -> dict[str, Any]:
    """An environment of a megabyte."""
    return {"env": {f"LONG_{number}": "x" * 65_000 for number in range(16)}}


def command_of(name: str) -> Callable[[Path], list[str]]:
    """Return a function from the file of marks to the command that runs a function of ``daemons``."""
    return lambda marks: [sys.executable, "-c", _FAULT.format(root=str(ROOT), name=name, marks=str(marks))]


def _command(name: str) -> Callable[[Path, Path], dict[str, Any]]:
    return lambda folder, marks: {"command": command_of(name)(marks)}


def _kind(
    name: str, what: str, *, state: JobState = JobState.SUCCEEDED, either: bool = False, reason: str = ""
) -> FaultKind:
    return FaultKind(
        name,
        what,
        Source.BROUGHT,
        state,
        reason,
        weight=0.3,
        exact=not name.startswith("command"),
        refused=True,
        either=either,
    )


_TABLE: tuple[tuple[FaultKind, Callable[[Path, Path], dict[str, Any]]], ...] = (
    (_kind("env-pythonpath", "PYTHONPATH with a sitecustomize"), _python_path),
    (_kind("env-path", "PATH with its own chrt, python, sh, ..."), _path),
    (_kind("env-shadow", "PYTHONPATH with modules of the library's names", either=True), _shadow),
    (_kind("env-interpreter", "PYTHONHOME and others that stop the interpreter"), _interpreter),
    (_kind("env-loader", "LD_PRELOAD, LD_AUDIT and others"), _loader),
    (_kind("env-long", "an environment of a megabyte", either=True), _limits),
    (_kind("command-daemons", "a command whose daemons go on between bubbles", either=True), _command("burn")),
    (_kind("command-escape", "a command that becomes a session and ends", either=True), _command("escape")),
    (_kind("command-continues", "a command that continues itself when it is stopped", either=True), _command("defy")),
)
KINDS = tuple(kind for kind, _ in _TABLE)
_BRING = {kind.name: bring for kind, bring in _TABLE}


def bring(kind: FaultKind, folder: Path, marks: Path) -> dict[str, Any]:
    """Return what a job of this kind has in addition to a task: ``env``, or a ``command`` in its place."""
    found = _BRING[kind.name](folder, marks)
    if folder.exists():
        for path in [folder, *folder.iterdir()]:
            os.chmod(path, 0o755)
    return found

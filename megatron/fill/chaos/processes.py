"""The processes of a chaos run, found by what their environment or command line says."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

_AGENT = "megatron.fill.runtime.agent"


def running(variable: str) -> list[int]:
    """The processes in whose environment this ``NAME=VALUE`` is: those of a training, and all that they started."""
    return _found("environ", variable)


def _found(file: str, *entries: str) -> list[int]:
    """The processes in whose ``/proc/PID/FILE`` all of these entries stand."""
    wanted = {entry.encode() for entry in entries}
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted <= set((folder / file).read_bytes().split(b"\0")):
                    found.append(int(folder.name))
    return found


def agents(run_dir: Path) -> dict[int, int]:
    """The agents of a run: rank to process."""
    found = {}
    for path in (run_dir / "agents").glob("spec*.json"):
        pids = _found("cmdline", _AGENT, str(path))
        if pids:
            found[int(path.stem.removeprefix("spec"))] = pids[0]
    return found


def state(pid: int) -> str:
    """The kernel's letter for it: ``T`` stopped, ``Z`` dead; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def maps(pid: int) -> str:
    """What files it has mapped; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
    except OSError:
        return ""


def send(pid: int, number: signal.Signals) -> bool:
    """Signal a process; False if it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


def await_end(variable: str, within_s: float) -> None:
    """Wait until no process with this in its environment is left, but no longer."""
    end_s = time.monotonic() + within_s
    while running(variable) and time.monotonic() < end_s:
        time.sleep(0.1)


def end_all(variable: str, within_s: float = 5.0) -> list[int]:
    """End every process with this in its environment, those that multiply too; what was found first."""
    found = running(variable)
    end_s = time.monotonic() + within_s
    left = found
    while left and time.monotonic() < end_s:
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in left:
                send(pid, number)
        time.sleep(0.05)
        left = running(variable)
    return found

"""Code that is run in a sandbox, and what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.fill.agent.admission import default_user
from megatron.fill.sandbox.config import Bind, Sandbox
from megatron.fill.sandbox.probe import SandboxSupport

MIB = 2**20
GUEST = default_user()
PROGRAM = """
import ctypes, errno, json, os, resource, signal, socket, subprocess, sys
from megatron.fill.linux import host
from megatron.fill.sandbox.config import Bind, Sandbox
from megatron.fill.sandbox.process import SandboxedProcess
from megatron.fill.sandbox.powers import limit_resources, most_tasks

def attempt(act, *arguments):
    try:
        act(*arguments)
    except (OSError, ValueError) as error:
        return type(error).__name__
    return "done"

def raw(number, *arguments):
    ctypes.set_errno(0)
    result = ctypes.CDLL(None, use_errno=True).syscall(number, *arguments)
    return "done" if result >= 0 else errno.errorcode[ctypes.get_errno()]

def body():
    {body}

{become}
host.adopt_orphans()
held = SandboxedProcess({sandbox!r}, lambda: {prepare}, body)
held.begin()
code = held.wait()
sys.exit(code if code >= 0 else 100 - code)
"""


class Inside:
    """Runs code in a sandbox, and gives what it printed as JSON."""

    def __init__(self, folder: Path, support: SandboxSupport) -> None:
        self.folder, self.namespaces, self.code = folder, support.namespaces, 0

    def run(
        self, body: str, prepare: str = "[]", binds: tuple[Bind, ...] = (), become: str = "", **changes: Any
    ) -> Any:
        user = GUEST.uid if GUEST else None
        group = GUEST.gid if GUEST else None
        options = {"namespaces": self.namespaces, "user": user, "group": group} | changes
        sandbox = Sandbox(directory=str(self.folder), binds=binds, **options)
        lines = "\n    ".join(body.strip().splitlines())
        program = PROGRAM.format(body=lines, sandbox=sandbox, prepare=prepare, become=become)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
        self.code = done.returncode
        assert done.stdout, done.stderr
        return json.loads(done.stdout)


def needs(support: SandboxSupport, *names: str) -> None:
    lacking = [name for name in names if name not in support.namespaces]
    if lacking:
        pytest.skip(f"this machine gives no namespace for {', '.join(lacking)}")

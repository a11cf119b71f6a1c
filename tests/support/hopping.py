"""A process with a job that leaves each of its parents behind: one look at all processes can miss it."""

from __future__ import annotations

import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_BEGIN = """
import os, sys, time
from megatron.fill.linux import host
host.adopt_orphans()
"""
_CHAIN = """
if not os.fork():
    os.setsid()
    for hop in range(50_000):  # it ends by itself, should nobody end it
        if os.fork():
            os._exit(0)
        os.setsid()
        if hop == 200:
            print(flush=True)
        time.sleep(0.001)
    os._exit(0)
time.sleep(1000)
"""


@contextmanager
def hopping(code: str = "", *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """The process, which adopts orphans and has run the code, once hundreds of its children have ended."""
    command = [sys.executable, "-c", f"{_BEGIN}{code}{_CHAIN}", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline()
            yield process
        finally:
            process.kill()


def all_ended(process: subprocess.Popen[bytes]) -> bool:
    """True if the process and its job end within ten seconds: who is left holds the pipe open."""
    assert process.stdout is not None
    ended, _, _ = select.select([process.stdout], [], [], 10)
    return bool(ended)

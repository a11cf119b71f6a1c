"""The process that ranks are forked from survives clients that are killed; its ranks are as if they were started."""

from __future__ import annotations

import array
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.launch import WARM, Warm
from tests.e2e.training import ROOT


def asked(code: str, environment: dict[str, str], output: Path) -> str:
    """The output of a warm Python that runs this code."""
    with output.open("w") as file:
        assert Warm(["-c", code], environment, os.environ[WARM], (file.fileno(), file.fileno())).wait() == 0
    return output.read_text()


@pytest.mark.parametrize("sent", ["nothing", "a part", "all"])
def test_who_asks_may_be_gone_before_the_answer(sent, tmp_path):
    exits = ["-c", "import sys; sys.exit(7)"]
    assert Warm(exits, dict(os.environ), os.environ[WARM]).wait() == 7
    request = json.dumps({"argv": ["-c", "pass"], "env": {}, "cwd": str(tmp_path)}).encode() + b"\n"
    for _ in range(20):
        with socket.socket(socket.AF_UNIX) as asking, open(os.devnull, "w") as nowhere:
            asking.connect(os.environ[WARM])
            if sent != "nothing":
                descriptors = array.array("i", [nowhere.fileno()] * 2).tobytes()
                data = request if sent == "all" else request[:10]
                asking.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
    assert Warm(exits, dict(os.environ), os.environ[WARM]).wait() == 7


def test_proc_shows_the_command_line_and_the_environment_that_were_asked_for(tmp_path):
    code = "print(*(open(f'/proc/self/{name}').read() for name in ('cmdline', 'environ')), sep='', end='')"
    found = asked(code, {"PLACE": "here", "PYTHONPATH": str(tmp_path)}, tmp_path / "output")
    assert found.split("\0") == [sys.executable, "-c", code, "PLACE=here", f"PYTHONPATH={tmp_path}", ""]
    found = asked("import sys; print(*sys.path, sep='\\n')", {"PYTHONPATH": str(tmp_path)}, tmp_path / "output")
    assert found.splitlines().count(str(tmp_path)) == 1


def test_a_terminal_of_its_own_is_the_terminal_of_its_session():
    ours, theirs = os.openpty()
    code = "import os; print(os.tcgetpgrp(os.open('/dev/tty', os.O_RDWR)) == os.getpid())"
    started = Warm(["-c", code], dict(os.environ), os.environ[WARM], (theirs, theirs), terminal=True)
    assert started.wait() == 0
    assert os.read(ours, 100).split() == [b"True"]
    os.close(theirs)
    os.close(ours)


IN_NAMESPACES = """
import os, sys
from tests.e2e.launch import WARM, Warm
os.unshare(os.CLONE_NEWNS | os.CLONE_NEWNET)
code = "import os; print(*(os.stat(f'/proc/self/ns/{name}').st_ino for name in ('mnt', 'net')), flush=True)"
exec(code)
sys.exit(Warm(["-c", code], dict(os.environ), os.environ[WARM]).wait())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can leave the machine's namespaces")
def test_it_lives_in_the_namespaces_of_the_process_that_asks():
    done = subprocess.run(
        [sys.executable, "-c", IN_NAMESPACES], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    own, warm = done.stdout.splitlines()
    assert own == warm
    assert own.split()[0] != str(os.stat("/proc/self/ns/mnt").st_ino)

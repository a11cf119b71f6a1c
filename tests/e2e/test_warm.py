"""The process that ranks are forked from outlives those who ask it and are killed meanwhile."""

from __future__ import annotations

import array
import json
import os
import socket

import pytest

from tests.e2e.launch import WARM, Warm


@pytest.mark.parametrize("sent", ["nothing", "a part", "all"])
def test_who_asks_may_be_gone_before_the_answer(sent, tmp_path):
    if WARM not in os.environ:
        pytest.skip("ranks are started anew")
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

"""Who is ended as an orphan, and who is none."""

from __future__ import annotations

import os
import subprocess
import sys

_PROGRAM = """
import os, subprocess, sys
from megatron.fill.linux import host
from megatron.fill.linux.reap import end_descendants
from megatron.fill.linux.tree import OWN
host.adopt_orphans()
own = subprocess.Popen(["sleep", "60"])  # such as a control program that is asked something
worker = subprocess.Popen(["sleep", "60"], process_group=0)
subprocess.run(["sh", "-c", "sleep 60 & setsid sleep 60 &"], process_group=0)
OWN.add(worker.pid)
end_descendants()
children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
print(sorted(map(int, children)) == sorted([own.pid, worker.pid]), own.poll(), worker.poll())
own.kill(), worker.kill()
"""


def test_orphans_are_ended_and_neither_workers_nor_what_the_process_runs_for_itself():
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True, timeout=60, env=dict(os.environ)
    )
    assert done.stdout == "True None None\n"

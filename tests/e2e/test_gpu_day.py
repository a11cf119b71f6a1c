"""The rehearsal of the GPU day on the CPU, in a short form: real trainings by the program's own steps."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tarfile

import pytest

from tests.e2e.training import REST_MS, ROOT, benchmark
from tests.e2e.warm import REST

PYTHON = """#!/bin/sh
case $1 in
    *gpu_identity.py) shift; exec {warm} "$@" ;;
esac
exec {python} "$@"
"""


@pytest.mark.timeout(900)  # quiet: 20 s; on a busy machine the jobs wait until others leave a core
def test_real_stages_are_rehearsed_and_kept(tmp_path):
    python = tmp_path / "python"
    warm = shlex.join(benchmark("gpu_identity"))
    python.write_text(PYTHON.format(warm=warm, python=shlex.quote(sys.executable)), encoding="utf-8")
    python.chmod(0o755)
    flags = ["--device", "cpu", "--only", "losses", "--seconds", "800"]  # less than this test may take
    done = subprocess.run(
        ["bash", "scripts/gpu_day.sh", "stages", str(tmp_path), *flags],
        cwd=ROOT,
        env=os.environ | {"PYTHON": str(python), REST: str(REST_MS)},
        capture_output=True,
        text=True,
        check=False,
    )
    content = json.loads((tmp_path / "stages.json").read_text(encoding="utf-8"))
    (step,) = content["steps"]
    log = (tmp_path / "stages.log").read_text(encoding="utf-8")
    assert (done.returncode, step["result"]) == (0, "ran"), (step, log)
    assert (content["rehearsal"], content["device"]) == (True, "cpu")
    assert step["found"]["identical"]
    assert step["found"]["iterations"] >= 20
    assert step["found"]["harvest_ratio"] > 0
    assert "REHEARSAL on the CPU" in done.stdout
    assert "iterations: the same, to the bit" in done.stdout
    assert "gpu_identity.py" in log
    with tarfile.open(tmp_path / "stages.tgz") as packed:
        names = {name.removeprefix("keep/losses/") for name in packed.getnames()}
    assert {"with.log", "without.log", "run/report.json"} <= names


def test_the_task_that_the_first_part_tries_runs(tmp_path):
    done = subprocess.run(
        ["bash", "scripts/gpu_day.sh", "look", str(tmp_path), "--device", "cpu", "--only", "try"],
        cwd=ROOT,
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    (step,) = json.loads((tmp_path / "look.json").read_text(encoding="utf-8"))["steps"]
    assert (done.returncode, step["result"]) == (0, "ran"), done.stdout
    assert "products" in (tmp_path / "look.log").read_text(encoding="utf-8")

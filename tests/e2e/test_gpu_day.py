"""The rehearsal of the GPU day on the CPU, in a short form: real trainings by the program's own steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(300)
def test_real_stages_are_rehearsed_and_kept(tmp_path):
    done = subprocess.run(
        ["bash", "scripts/gpu_day.sh", "smoke", str(tmp_path), "--device", "cpu", "--only", "stages"],
        cwd=ROOT,
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    content = json.loads((tmp_path / "smoke.json").read_text(encoding="utf-8"))
    (step,) = content["steps"]
    assert (done.returncode, step["result"]) == (0, "ran"), step
    assert (content["rehearsal"], content["device"]) == (True, "cpu")
    assert step["found"]["identical"]
    assert step["found"]["iterations"] >= 20
    assert step["found"]["harvest_ratio"] > 0
    assert "REHEARSAL on the CPU" in done.stdout
    assert "iterations: the same, to the bit" in done.stdout
    assert "gpu_identity.py" in (tmp_path / "smoke.log").read_text(encoding="utf-8")

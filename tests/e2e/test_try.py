"""``pipefill try`` for real: no training, and everything else of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from megatron.fill.folders import output_file
from tests.e2e.training import ROOT, processes, write_jobs

CLI = [
    sys.executable,
    "-c",
    f"import sys; sys.path.insert(0, {str(ROOT)!r}); from megatron.fill.cli import main; main()",
]
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
SLOW = """
import time
from megatron.fill import SideTask

class SlowPause(SideTask):
    def run_next_step(self):
        time.sleep(0.001)

    def pause(self):
        time.sleep(self.seconds)

    def create(self, seconds):
        self.seconds = seconds
"""


def tried(folder: Path, *arguments: str) -> tuple[int, list[dict]]:
    folder.chmod(0o755)
    command = [*CLI, "try", *arguments, "--device", "cpu", "--json"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=ENVIRONMENT, timeout=200, check=False
    )
    assert "Traceback" not in done.stderr
    assert not processes(str(folder), "fill")
    return done.returncode, json.loads(done.stdout)


def test_a_task_is_run_saved_and_goes_on_in_a_new_process(tmp_path):
    write_jobs(tmp_path, {"name": "spin", "task": "tasks:Spin", "args": {"milliseconds": 2.0}, "memory": "512MiB"})
    status, [trial] = tried(tmp_path, "jobs.yaml", "--seconds", "1", "--keep", "kept")
    assert (status, trial["ended"], trial["reason"]) == (0, "ok", "")
    callbacks = {"create()", "load_state_dict()", "init()", "start()", "pause()", "state_dict()", "stop()"}
    assert set(trial["callbacks_ms"]) == callbacks
    checkpoint = trial["checkpoint"]
    assert checkpoint["outcome"] == "ok"
    assert checkpoint["loaded_work"] == checkpoint["saved_work"] > 0
    assert trial["work_done"] == checkpoint["saved_work"] + trial["steps"]["count"] == trial["result"]["done"]
    assert trial["steps"]["longest_ms"] >= trial["steps"]["p99_ms"] >= trial["steps"]["p50_ms"] >= 1.9
    assert trial["use"]["bubbles"] >= 2
    assert 0 < trial["use"]["used"] <= 1
    assert 1 << 20 < trial["peak_bytes"] < trial["memory_bytes"] == 512 << 20
    assert output_file(Path(trial["folder"])).exists()
    assert str(tmp_path / "kept") in trial["folder"]


def test_a_pause_that_takes_too_long_is_named(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    status, [trial] = tried(tmp_path, "slow.py:SlowPause", "seconds=0.4", "--grace-ms", "100")
    assert (status, trial["ended"]) == (1, "failed")
    assert trial["reason"] == ("pause() ran on after its bubble by more than 0.1 s (grace_ms) 3 times (max_overruns)")
    assert trial["use"]["violations"] == 3


def test_sharing_by_mps_is_refused_where_there_is_no_gpu(tmp_path):
    tmp_path.chmod(0o755)
    (tmp_path / "slow.py").write_text(SLOW)
    command = [*CLI, "try", "slow.py:SlowPause", "seconds=0", "--device", "cpu"]
    done = subprocess.run(
        [*command, "--sharing", "mps"], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "sharing by MPS was asked for, but there is no GPU" in done.stderr

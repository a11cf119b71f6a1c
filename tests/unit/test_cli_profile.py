"""``pipefill profile``: jobs measured by themselves, into a file and a store, from which ``pipefill plan`` plans."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CLI = [sys.executable, "-c", "from megatron.fill.cli import main; main()"]
TASK = """
import time
from megatron.fill.profiles import Configuration
from megatron.fill.sidetask.nodes import NodeTask

class Two(NodeTask):
    split = "by hand"

    def create(self, milliseconds=(1, 3), fail=""):
        if fail:
            raise ValueError(fail)
        self.milliseconds = milliseconds
        self.context.total_work = 50.0

    def configurations(self):
        return [Configuration(1), Configuration(2)]

    def configure(self, configuration):
        self.batch = configuration.batch_size

    def node_names(self):
        return "forward 0", "backward 0"

    def iteration_work(self):
        return float(self.batch)

    def run_next_step(self):
        node, self.next_node = self.next_node, 1 - self.next_node
        end_ns = time.process_time_ns() + int(self.milliseconds[node] * self.batch * 1e6)
        while time.process_time_ns() < end_ns:
            pass
        return float(self.batch * node)
"""
BUBBLES = {
    "ranks": [{"rank": 0, "iteration_ms": 100.0, "training": [{"kind": "fill", "p10_ms": 30.0, "free_bytes": 0}]}]
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "two.py").write_text(TASK)
    (tmp_path / "bubbles.json").write_text(json.dumps(BUBBLES))
    jobs = [
        {"name": "two", "task": "two:Two", "count": 2},
        {"name": "pi", "task": "megatron.fill.sidetask.digits:DigitsTraining"},
        {"name": "ls", "command": "ls"},
    ]
    (tmp_path / "jobs.yaml").write_text(json.dumps({"jobs": jobs}))
    broken = {"name": "broken", "task": "two:Two", "args": {"fail": "no such data"}}
    (tmp_path / "broken.yaml").write_text(json.dumps({"jobs": [broken]}))
    return tmp_path


def pipefill(folder: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"COLUMNS": "80"}
    done = subprocess.run([*CLI, *arguments], capture_output=True, text=True, cwd=folder, env=environment, check=False)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


def test_profiles_go_to_a_file_and_a_store_and_plans_come_from_them(folder):
    done = pipefill(folder, "profile", "jobs.yaml", "--device", "cpu", "-o", "profiles.json", "--store", "jobs.db")
    assert "two-0" in done.stdout
    assert "by hand" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "pi: megatron.fill.sidetask.digits:DigitsTraining is no NodeTask" in done.stderr
    profiles = json.loads((folder / "profiles.json").read_text())
    assert sorted(profiles) == ["two-0", "two-1"]
    one, two = profiles["two-0"]
    assert (one["configuration"], one["work"], two["configuration"], two["work"]) == ("b1", 1.0, "b2", 2.0)
    assert [node["name"] for node in one["nodes"]] == ["forward 0", "backward 0"]
    assert [node["duration_ns"] // 1_000_000 for node in two["nodes"]] == [2, 6]
    assert all(node["memory_bytes"] > 1 << 20 for node in one["nodes"])
    plans = [
        json.loads(pipefill(folder, "plan", "jobs.yaml", "--bubbles", "bubbles.json", *source, "--json").stdout)
        for source in (["--profiles", "profiles.json"], ["--store", "jobs.db"])
    ]
    assert plans[0] == plans[1]
    assert plans[0]["plans"][0]["work_per_cycle"] == pytest.approx(7, abs=1)


def test_a_job_that_cannot_be_measured_says_why(folder):
    done = pipefill(folder, "profile", "broken.yaml", "--device", "cpu", code=1)
    assert "broken: not measured: ValueError: no such data" in done.stderr


def test_a_file_with_nothing_to_measure_is_no_success(folder):
    (folder / "plain.yaml").write_text("jobs: [{name: ls, command: ls}]")
    done = pipefill(folder, "profile", "plain.yaml", "--device", "cpu", code=1)
    assert "ls: is a command: there is nothing to measure before it runs" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["jobs.yaml", "--device", "tpu"], "--device is 'tpu': expected cpu or cuda:0"),
        (["none.yaml"], "none.yaml: cannot be read"),
        (["jobs.yaml", "--device", "cpu", "-o", "two.py/p.json"], "--output two.py/p.json: cannot be written"),
    ],
)
def test_wrong_arguments(folder, arguments, message):
    done = pipefill(folder, "profile", *arguments, code=2)
    assert done.stderr.splitlines()[-1].startswith("pipefill: error: ")
    assert message in done.stderr

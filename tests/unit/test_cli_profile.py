"""``pipefill profile``: jobs measured by themselves, into a file and a store, from which ``pipefill plan`` plans."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.fill.cli import main, profile
from megatron.fill.trial.result import Ended, Options, Steps, Trial

CLI = [sys.executable, "-c", "from megatron.fill.cli import main; main()"]
TASK = """
import time
from megatron.fill.profiles import Configuration
from megatron.fill.sidetask import SideTask
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

class Plain(SideTask):
    pass
"""
BUBBLES = {
    "ranks": [{"rank": 0, "iteration_ms": 100.0, "training": [{"kind": "fill", "p10_ms": 30.0, "free_bytes": 0}]}]
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "two.py").write_text(TASK)
    (tmp_path / "bubbles.json").write_text(json.dumps(BUBBLES))
    jobs = [{"name": "two", "task": "two:Two", "count": 2}]
    (tmp_path / "jobs.yaml").write_text(json.dumps({"jobs": jobs}))
    broken = {"name": "broken", "task": "two:Two", "args": {"fail": "no such data"}}
    (tmp_path / "broken.yaml").write_text(json.dumps({"jobs": [broken]}))
    plain = [
        {"name": "plain", "task": "two:Plain", "count": 2},
        {"name": "fails", "task": "two:Plain", "args": {"fail": "now"}},
        {"name": "busy", "command": "sh -c 'while true; do :; done'"},
    ]
    (tmp_path / "plain.yaml").write_text(json.dumps({"jobs": plain}))
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


def test_jobs_without_nodes_are_measured_by_running_them(folder, monkeypatch, capsys):
    """Run by what ``pipefill try`` runs them with, which has tests of its own."""
    ran: list[str] = []

    def trials_of(jobs: Any, search: Any, options: Options, *rest: Any) -> Iterator[Trial]:
        assert not options.round_trip
        for job in jobs:
            ran.append(job.name)
            failed = "fail" in job.args
            yield Trial(
                *(job.name, job.what, "cpu", Ended.FAILED if failed else Ended.OK, "ValueError: now" * failed),
                work_done=40.0,
                peak_bytes=5 << 20,
                steps=Steps(10, 2.0, 3.5, 4.0) if job.task else None,
            )

    monkeypatch.setattr(profile, "trials_of", trials_of)
    monkeypatch.setattr(sys, "argv", ["pipefill", "profile", "plain.yaml", "--device", "cpu", "-o", "profiles.json"])
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert ended.value.code == 1
    assert ran == ["plain-0", "fails", "busy"]
    rows = [line.split() for line in out.splitlines() if line.startswith(("plain", "busy", "fails"))]
    steps = ["10", "2.00", "3.50", "4.00", "5"]
    assert rows == [["plain-0", *steps], ["plain-1", *steps], ["busy", *"----", "5"]]
    assert "fails: not measured: ValueError: now" in err
    profiles = json.loads((folder / "profiles.json").read_text())
    step = {"name": "step", "duration_ns": 2_000_000, "memory_bytes": 5 << 20}
    one = [{"configuration": "b1", "work": 4.0, "nodes": [step]}]
    assert profiles == {"plain-0": one, "plain-1": one}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["jobs.yaml", "--device", "tpu"], "--device is 'tpu': expected cpu or cuda:0"),
        (["jobs.yaml", "--device", "cuda:99"], "--device is 'cuda:99', which is not there"),
        (["none.yaml", "--device", "cpu"], "none.yaml: cannot be read"),
        (["jobs.yaml", "--device", "cpu", "-o", "no/where.json"], "no/where.json: cannot be written"),
    ],
)
def test_wrong_arguments(folder, arguments, message):
    done = pipefill(folder, "profile", *arguments, code=2)
    assert done.stderr.splitlines()[-1].startswith("pipefill: error: ")
    assert message in done.stderr

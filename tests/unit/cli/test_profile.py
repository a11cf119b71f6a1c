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
from megatron.fill.trial.result import Ended, Options, Trial, Use

CLI = [sys.executable, "-c", "from megatron.fill.cli import main; main()"]
TASK = """
import time
from megatron.fill.profiles import Configuration
from megatron.fill.sidetask import ImperativeTask, SideTask
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
    def create(self, fail="", works=True):
        if fail:
            raise ValueError(fail)
        self.done, self.works = 0, works

    def run_next_step(self):
        if self.done == 10 or not self.works and self.done:
            raise StopIteration
        time.sleep(0.002 * (1 + self.next_node))
        self.done += 1
        self.next_node = self.done % 2
        return self.works

class Long(ImperativeTask):
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
        {"name": "idle", "task": "two:Plain", "args": {"works": False}},
    ]
    runs = [
        {"name": "busy", "command": "sh -c 'while true; do :; done'", "count": 2},
        {"name": "gone", "command": "nowhere"},
        {"name": "long", "task": "two:Long"},
    ]
    (tmp_path / "runs.yaml").write_text(json.dumps({"jobs": runs}))
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


def test_the_steps_of_a_plain_task_are_measured_by_kind(folder):
    done = pipefill(
        folder, "profile", "plain.yaml", "--device", "cpu", "-o", "profiles.json", "--store", "jobs.db", code=1
    )
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("plain")]
    assert [row[:3] for row in rows] == [[f"plain-{at}", kind, count] for at in (0, 1) for kind, count in ("05", "15")]
    assert "fails: not measured: ValueError: now" in done.stderr
    assert "idle: not measured: it did no work in 1 steps" in done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    profiles = json.loads((folder / "profiles.json").read_text())
    [one] = profiles["plain-0"]
    assert profiles == {"plain-0": [one], "plain-1": [one]}
    short, long = one["nodes"]
    assert [node["name"] for node in one["nodes"]] == ["step of kind 0", "step of kind 1"]
    assert 1e6 < short["duration_ns"] < long["duration_ns"]
    assert short["memory_bytes"] > 1 << 20
    assert one["work"] > 0
    (folder / "one.yaml").write_text(json.dumps({"jobs": [{"name": "one", "task": "two:Plain"}]}))
    planned = pipefill(folder, "plan", "one.yaml", "--bubbles", "bubbles.json", "--store", "jobs.db", "--json")
    plan = json.loads(planned.stdout)
    assert plan["plans"][0]["work_per_cycle"] > 0


def test_a_long_run_is_measured_by_running_it(folder, monkeypatch, capsys):
    """Run by what ``pipefill try`` runs them with, which has tests of its own."""
    ran: list[str] = []

    def trials_of(jobs: Any, search: Any, options: Options, *rest: Any) -> Iterator[Trial]:
        assert not options.round_trip
        for job in jobs:
            ran.append(job.name)
            failed = job.name == "gone"
            yield Trial(
                *(job.name, job.what, "cpu", Ended.FAILED if failed else Ended.OK, "command not found" * failed),
                work_done=1.5,
                bubble_ms=50.0,
                peak_bytes=5 << 20,
                callbacks_ms={"pause()": 2.0},
                use=Use(60, 0.5, 10.0, 0, 0.0, 0),
            )

    monkeypatch.setattr(profile, "trials_of", trials_of)
    monkeypatch.setattr(sys, "argv", ["pipefill", "profile", "runs.yaml", "--device", "cpu", "-o", "profiles.json"])
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert ended.value.code == 1
    assert ran == ["busy-0", "gone", "long"]
    rows = [line.split() for line in out.splitlines() if line.startswith(("busy", "gone", "long"))]
    assert rows == [["busy-0", "2.00", "5"], ["busy-1", "2.00", "5"], ["long", "2.00", "5"]]
    assert "gone: not measured: command not found" in err
    profiles = json.loads((folder / "profiles.json").read_text())
    node = {"name": "pause", "duration_ns": 2_000_000, "memory_bytes": 5 << 20}
    one = [{"configuration": "b1", "work": 0.002, "nodes": [node]}]  # as fast as the clock
    assert profiles == {"busy-0": one, "busy-1": one, "long": one}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["jobs.yaml", "--device", "tpu"], "--device is 'tpu': expected cpu or cuda:0"),
        (["jobs.yaml", "--device", "cuda:99"], "--device is 'cuda:99', which is not there"),
        (["none.yaml", "--device", "cpu"], "none.yaml: cannot be read"),
        (["jobs.yaml", "--device", "cpu", "-o", "two.py/p.json"], "--output two.py/p.json: cannot be written"),
    ],
)
def test_wrong_arguments(folder, arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["pipefill", "profile", *arguments])
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.splitlines()[-1].startswith("pipefill: error: ")
    assert message in said

"""A short chaos run with faults of many kinds: the training does not notice, and no job is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.training import REST_MS, ROOT, SCRIPT, processes
from tests.e2e.warm import REST

TRAINED = 110  # iterations: the rests make them last as long as more would
# One of each way that the tasks of the other end-to-end tests have not: a worker that is stopped, or that hangs where
# Python cannot be interrupted; a checkpoint that is damaged; a write to the rank's own pages, and a call on the rank;
# the world around; the operator.  `python -m tests.chaos` knows many more.
CHOSEN = ["sigstop-self", "hang-gil", "checkpoint-newest", "gate-write", "prlimit-rank", "disk-full", "operator"]


if SCRIPT != "pretrain_gpt.py":
    pytest.skip("pretrain_gpt.py, which chaos trains with, needs megatron-core 0.19", allow_module_level=True)


pytestmark = pytest.mark.timeout(900)  # quiet: a minute and a half; on a busy machine the faults wait for their jobs


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("chaos")
    arguments = ["--faults", "1", "--kinds", ",".join(CHOSEN), "--iterations", str(TRAINED)]
    arguments += ["--json", str(folder / "chaos.json"), "--keep", str(folder / "kept")]
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", *arguments],
        cwd=ROOT,
        env=os.environ | {REST: str(REST_MS)},
        capture_output=True,
        text=True,
        check=False,
        timeout=850,
    )
    assert (folder / "chaos.json").exists(), done.stderr[-4000:]
    outcome = json.loads((folder / "chaos.json").read_text(encoding="utf-8"))
    return outcome | {"code": done.returncode, "output": done.stdout, "progress": done.stderr, "folder": str(folder)}


def test_no_fault_reaches_the_training_and_no_job_is_lost(ran):
    assert ran["lost"] == [], ran["progress"][-4000:]
    harm = ("main_failures", "loss_differences", "jobs_lost", "leaked_processes")
    assert {name: ran["summary"][name] for name in harm} == dict.fromkeys(harm, 0)
    assert ran["summary"]["injected"] >= len(CHOSEN) - len(ran["not_run"])
    # Where others use the machine too, their work may look like a slowdown.
    assert ran["code"] == int(bool(ran["summary"]["slowed"] or ran["summary"]["stalls"]))


def test_every_kind_was_injected_or_says_why_not(ran):
    injected = {row["kind"] for row in ran["kinds"] if row["injected"]}
    not_run = {row["kind"]: row["why"] for row in ran["not_run"]}
    assert injected | set(not_run) == set(CHOSEN)
    assert all(not_run.values())
    assert ran["summary"]["injected"] == sum(row["injected"] for row in ran["kinds"])


def test_the_table_fits_a_terminal_and_nothing_is_left(ran):
    assert all(kind in ran["output"] for kind in CHOSEN)
    table = ran["output"].partition("lost:")[0]
    assert "EXPECTED" in table
    assert max(map(len, table.splitlines())) <= 80
    assert not processes(ran["folder"])  # the agents' and workers' command lines name it
    assert ran["folder"] not in Path("/proc/mounts").read_text(encoding="utf-8")

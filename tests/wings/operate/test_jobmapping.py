"""The lines of jobs in the files that dcgm-exporter reads: written and removed, never an empty file or a line twice."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.fill.agent.run import JobRun
from megatron.fill.device.nvml import Gpu
from megatron.fill.wings.operate import jobmapping
from megatron.fill.wings.operate.jobmapping import JobMapping, open_mapping
from tests.support.posts import post

GPUS = [Gpu(0, "GPU-a", "H100"), Gpu(3, "GPU-b", "H100")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "3"


def seen(folder: Path) -> list[str]:
    """The names that the exporter takes for those of GPUs, or of anything that it would have to read."""
    return [path.name for path in folder.iterdir() if not path.name.startswith(".pipefill-")]


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_a_line_is_there_while_the_job_runs_and_the_file_with_it(path):
    mapping = JobMapping(path)
    assert not path.exists()
    with mapping.shown("pi-1"):
        assert lines(path) == ["pipefill-pi-1"]
        with mapping.shown("tail-2"):
            assert lines(path) == ["pipefill-pi-1", "pipefill-tail-2"]
        assert lines(path) == ["pipefill-pi-1"]
    assert seen(path.parent) == []  # an empty file would hide the idle GPU
    assert path.parent.is_dir()


def test_a_line_is_there_once_however_often_the_job_is(path):
    path.write_text("17\n17\n\npipefill-pi-1\n")  # from a prolog, and of an agent that was killed
    mapping = JobMapping(path)
    assert lines(path) == ["17"]
    with mapping.shown("pi-1"), mapping.shown("pi-1"):  # the exporter would answer with an error
        mapping.keep()
        assert lines(path) == ["17", "pipefill-pi-1"]
    assert lines(path) == ["17"]


def test_an_empty_file_of_others_goes_and_their_lines_stay(path):
    path.write_text("\n")
    mapping = JobMapping(path)
    assert not path.exists()
    path.write_text("17\n")
    with mapping.shown("pi-1"):
        assert lines(path) == ["17", "pipefill-pi-1"]
        path.unlink()  # by an epilog
        mapping.keep()
        assert lines(path) == ["pipefill-pi-1"]
    assert not path.exists()


def test_agents_that_share_a_gpu_do_not_lose_each_others_lines(path, monkeypatch):
    monkeypatch.setattr(jobmapping, "_LOCK_S", 60.0)  # a busy machine may not let one of them have it in time
    mappings = [JobMapping(path) for _ in range(4)]

    def run(number: int) -> bool:
        seen = True
        for turn in range(50):
            with mappings[number].shown(f"job-{number}-{turn}"):
                seen = seen and f"pipefill-job-{number}-{turn}" in lines(path)
        return seen

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(4)))
    assert not path.exists()


# An agent that does not end by itself while its standard input is open, so that no failed test waits for it.
LIVES = """
import sys
from pathlib import Path
from megatron.fill.wings.operate.jobmapping import JobMapping
with JobMapping(Path(sys.argv[1])).shown("killed-1"):
    print("shown", flush=True)
    sys.stdin.read()
"""


def agent_of(path: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", LIVES, str(path)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_what_a_killed_agent_left_goes_when_another_one_of_the_node_looks(path):
    path.write_text("17\n")
    other = JobMapping(path.with_name("0"))
    with agent_of(path) as agent:
        assert agent.stdout is not None
        assert agent.stdout.readline() == b"shown\n"
        with other.shown("pi-1"):
            other.keep()
            assert lines(path) == ["17", "pipefill-killed-1"]  # it lives
            agent.kill()
            agent.wait()
            other.keep()
            assert (lines(path), lines(path.with_name("0"))) == (["17"], ["pipefill-pi-1"])
    path.write_text("pipefill-of-somebody-else\n")
    path.with_name(".pipefill-3").unlink()
    other.keep()
    assert path.exists()  # no agent was there


def test_the_next_agent_of_any_gpu_removes_what_is_left(path):
    with agent_of(path) as agent:
        assert agent.stdout is not None
        assert agent.stdout.readline() == b"shown\n"
        agent.kill()
    assert path.exists()
    JobMapping(path.with_name("0"))
    assert seen(path.parent) == []


def test_a_folder_that_is_gone_does_no_harm_and_is_said_once(tmp_path, caplog):
    mapping = JobMapping(tmp_path / "nowhere" / "0")
    with mapping.shown("pi-1"):
        mapping.keep()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "does not show which jobs run" in caplog.text


def test_the_exporter_may_read_it(path):
    with JobMapping(path).shown("pi-1"):
        assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    ("directory", "uuid", "there"),
    [(True, "GPU-b", True), (False, "GPU-b", False), (True, None, False), (True, "MIG-c", False)],
)
def test_the_file_is_that_of_the_gpus_index(tmp_path, directory, uuid, there):
    mapping = open_mapping(str(tmp_path) if directory else None, uuid, lambda: GPUS)
    assert (mapping is not None) is there
    if mapping is not None:
        with mapping.shown("pi-1"):
            assert seen(tmp_path) == ["3"]


def test_a_job_that_cannot_be_started_leaves_no_line(path, tmp_path):
    with post(tmp_path / "run") as at:
        mapping = JobMapping(path)
        run = JobRun(replace(at.context, attendants=(mapping,)), at.pool, at.judge, at.claim(task="nowhere:Task"), None)
        run.run()
    assert not path.exists()

"""``scripts/train_slurm.sh`` on a real SLURM, with something in the training's place that takes a second."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.cluster import PrivateSlurm
from tests.slurm.conftest import output, running_slurm
from tests.support.waiting import until

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SCRIPT = str(ROOT / "scripts" / "train_slurm.sh")
LONG = "100000"


@pytest.fixture(scope="module")
def slurm() -> Iterator[PrivateSlurm]:
    yield from running_slurm(nodes=2, cpus=4)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A checkout in miniature, with a space in its name, where jobs are submitted from."""
    made = tmp_path / "my work"
    made.mkdir()
    shutil.copy(HERE / "standin.py", made / "pretrain_gpt.py")
    return made


@pytest.fixture
def submit(slurm: PrivateSlurm, place: Path) -> Iterator[Callable[..., str]]:
    jobs: list[str] = []

    def submit(*arguments: str, flags: tuple[str, ...] = ("-c", "2"), **variables: str) -> str:
        given = {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)} | variables
        jobs.append(slurm.submit(*flags, SCRIPT, *arguments, cwd=place, **given))
        return jobs[-1]

    yield submit
    slurm.call("scancel", "--signal=KILL", "--full", "--user=root")
    slurm.call("scancel", "--user=root")


def told(place: Path, rank: int = 0) -> list[dict[str, Any]]:
    path = place / f"rank{rank}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def started(place: Path) -> bool:
    return all(told(place, rank) for rank in range(2))


def test_ranks_are_told_who_they_are(slurm, submit, place):
    job = submit("1", flags=("-N", "2", "-c", "2"))
    assert slurm.wait_for(job, "COMPLETED", "FAILED") == "COMPLETED", output(place, job)
    ranks = [told(place, rank)[0] for rank in range(4)]
    assert [(its["RANK"], its["LOCAL_RANK"], its["GROUP_RANK"]) for its in ranks] == [
        ("0", "0", "0"),
        ("1", "1", "0"),
        ("2", "0", "1"),
        ("3", "1", "1"),
    ]
    for its in ranks:
        assert (its["WORLD_SIZE"], its["LOCAL_WORLD_SIZE"], its["GROUP_WORLD_SIZE"]) == ("4", "2", "2")
        assert (its["MASTER_ADDR"], its["MASTER_PORT"]) == (ranks[0]["MASTER_ADDR"], ranks[0]["MASTER_PORT"])


def test_jobs_of_an_array_on_one_node_meet_on_ports_of_their_own(slurm, submit, place):
    array = submit("30", flags=("-c", "2", "-w", "n1", "--array=0-1"))
    until(lambda: len(told(place)) == 2)
    assert len({its["MASTER_PORT"] for its in told(place)}) == 2
    for task in ("0", "1"):
        assert slurm.wait_for(f"{array}_{task}", "COMPLETED", "FAILED") == "COMPLETED"


def test_a_notice_to_a_job_of_an_array_leaves_the_others(slurm, submit, place):
    array = submit(LONG, flags=("-c", "2", "--array=0-1"))
    until(lambda: len(told(place)) == len(told(place, 1)) == 2)
    time.sleep(0.5)
    slurm.call("scancel", "--signal=USR2", f"{array}_1")  # the last one, whose number is the array's
    until(lambda: "Restarts=1" in slurm.call("scontrol", "show", "job", f"{array}_1"))
    assert "Restarts=0" in slurm.call("scontrol", "show", "job", f"{array}_0")


def test_a_port_where_somebody_listens_is_passed_over(slurm, submit, place):
    job = submit("1", flags=("-c", "2", "--hold"))
    usual = 10000 + int(job) % 20000
    with socket.socket() as other:
        other.bind(("127.0.0.1", usual))
        other.listen()
        slurm.call("scontrol", "release", job)
        assert slurm.wait_for(job, "COMPLETED", "FAILED") == "COMPLETED", output(place, job)
    assert told(place)[0]["MASTER_PORT"] == str(usual + 1)


def test_too_few_cpus_are_refused_with_what_to_write(slurm, submit, place):
    job = submit("1", flags=())
    assert slurm.wait_for(job, "COMPLETED", "FAILED") == "FAILED"
    assert output(place, job) == (
        "train_slurm.sh: error: 2 ranks per node, but SLURM gave 1 CPUs on a node; "
        "expected sbatch --cpus-per-task 2 (for one task per node), --exclusive, or a smaller RANKS\n"
    )


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANKS": "two"}, "RANKS is 'two'; expected the number of ranks per node"),
        ({"RANKS": "0"}, "RANKS is '0'; expected the number of ranks per node"),
        ({"RANKS": "02"}, "RANKS is '02'; expected the number of ranks per node"),  # octal to bash
        ({"PIPEFILL": "/nowhere"}, "there is no pretrain_gpt.py in /nowhere; expected the checkout in PIPEFILL"),
        ({"PYTHON": ""}, "expected {place}/scripts/setup.sh run first, or PYTHON"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(slurm, submit, place, variables, message):
    job = submit("1", **variables)
    assert slurm.wait_for(job, "COMPLETED", "FAILED") == "FAILED"
    said = output(place, job)
    assert message.format(place=place) in said
    assert said.count("\n") == 1


def test_the_checkout_is_found_where_the_script_lies(slurm, tmp_path, place):
    checkout = tmp_path / "checkout"
    (checkout / "scripts").mkdir(parents=True)
    shutil.copy(SCRIPT, checkout / "scripts")
    shutil.move(place / "pretrain_gpt.py", checkout)
    script = str(checkout / "scripts" / "train_slurm.sh")
    given = {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    job = slurm.submit("-c", "2", "--chdir", str(place), script, "1", cwd=tmp_path, **given)
    assert slurm.wait_for(job, "COMPLETED", "FAILED") == "COMPLETED", output(place, job)
    assert told(place)


def test_a_notice_before_the_time_limit_saves_and_queues_again(slurm, submit, place):
    job = submit("45")
    for restart in range(2):
        until(lambda: all(len(told(place, rank)) > restart for rank in range(2)))  # noqa: B023
        time.sleep(0.5)
        slurm.call("scancel", "--signal=USR2", job)
        until(lambda: (place / "saved1").exists())
        until(lambda: output(place, job).count("queued again") > restart)  # noqa: B023
    assert slurm.wait_for(job, "COMPLETED", "FAILED") == "COMPLETED", output(place, job)
    assert [its["restarts"] for its in told(place)] == ["0", "1", "2"]
    assert [(place / f"saved{rank}").read_text() for rank in range(2)] == ["45", "45"]
    assert output(place, job).count("SIGUSR2 ended the training before its last iteration; it is queued again") == 2
    assert not list(place.glob(".pipefill-*"))


def test_a_notice_to_the_script_alone_reaches_the_ranks(slurm, submit, place):
    job = submit("20")
    until(lambda: started(place))
    time.sleep(0.5)
    slurm.call("scancel", "--batch", "--signal=USR2", job)
    until(lambda: "queued again" in output(place, job))
    assert slurm.wait_for(job, "COMPLETED", "FAILED") == "COMPLETED", output(place, job)
    assert len(told(place)) == 2


def test_a_notice_before_the_ranks_listen_is_not_lost(slurm, submit, place):
    job = submit("20", "--deaf-seconds", "2")
    until(lambda: started(place))
    slurm.call("scancel", "--signal=USR2", job)
    until(lambda: "queued again" in output(place, job))
    assert slurm.wait_for(job, "COMPLETED", "FAILED") == "COMPLETED", output(place, job)


def test_a_cancelled_job_stays_until_what_its_ranks_left_is_saved(slurm, submit, place):
    job = submit(LONG, "--slow-helper")
    until(lambda: started(place))
    time.sleep(0.5)
    slurm.call("scancel", job)
    slurm.wait_for(job, "CANCELLED")
    until(lambda: (place / "helper-saved").exists(), 20)
    assert "queued again" not in output(place, job)


def test_a_rank_that_fails_ends_the_others(slurm, submit, place):
    (place / "saved1").write_text("no number")
    job = submit(LONG)
    assert slurm.wait_for(job, "COMPLETED", "FAILED") == "FAILED"
    assert "ValueError" in output(place, job)


def test_a_job_on_a_lost_node_runs_again(slurm, submit, place):
    job = submit("50", flags=("-c", "2", "-w", "n2"))
    until(lambda: started(place))
    slurm.lose_node("n2")
    slurm.call("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=lost")
    slurm.start_node("n2")  # it is in service again as soon as it has registered (ReturnToService)
    assert slurm.wait_for(job, "COMPLETED", "FAILED", "NODE_FAIL") == "COMPLETED", output(place, job)
    assert [its["restarts"] for its in told(place)] == ["0", "1"]


def test_ranks_are_bound_to_cores_of_their_own(tmp_path, place):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("there is one core")
    for slurm in running_slurm(task_plugin="task/affinity"):
        given = {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
        job = slurm.submit("-c", "2", SCRIPT, "1", cwd=place, **given)
        assert slurm.wait_for(job, "COMPLETED", "FAILED") == "COMPLETED", output(place, job)
        first, second = (set(told(place, rank)[0]["cpus"]) for rank in range(2))
        assert first
        assert second
        assert not first & second


def test_it_trains_in_an_allocation_of_salloc(slurm, place):
    given = {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    slurm.call("salloc", "-N", "2", "-c", "2", "bash", SCRIPT, "1", cwd=place, **given)
    assert [told(place, rank)[0]["GROUP_RANK"] for rank in range(4)] == ["0", "0", "1", "1"]


def test_more_flags_reach_srun(slurm, submit, place):
    job = submit("1", SRUN_FLAGS="--label --export=ALL,MARK=here")
    assert slurm.wait_for(job, "COMPLETED", "FAILED") == "COMPLETED", output(place, job)

"""What a job is let in with: little of the environment, another user, and only what is allowed."""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.fill.agent.admission import (
    JobUser,
    check_reach,
    default_user,
    environment,
    find_user,
    job_variables,
    refusal,
)
from megatron.fill.errors import ConfigError
from megatron.fill.linux.host import apply_environment
from megatron.fill.work import Work
from megatron.fill.worker.spec import WorkerSpec
from tests.support.fakes import worker_spec

HOST = {
    "PATH": "/bin",
    "LC_ALL": "C.UTF-8",
    "HOME": "/home/ada",
    "PYTHONPATH": "/here",
    "HF_TOKEN": "secret",
    "WANDB_API_KEY": "secret",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "PIPEFILL_STORE": "postgresql+psycopg://ada:secret@host/jobs",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "RANK": "0",
    "WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "1",
    "SLURM_JOB_ID": "7",
    "LD_PRELOAD": "/evil.so",
}
GUEST = JobUser("nobody", 65534, 65534, "/nonexistent")


def test_neither_secrets_nor_the_rendezvous_reach_a_worker():
    kept = environment(HOST, {}, None, Path("/run/jobs/a-1"))
    assert {name for name in kept if name in HOST} == {"PATH", "LC_ALL", "HOME", "PYTHONPATH"}
    assert "secret" not in "".join(kept.values())
    assert kept["OMP_NUM_THREADS"] == "1"


def test_what_the_device_needs_has_the_last_word():
    kept = environment(HOST | {"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "GPU-1"}, None, Path("/x"))
    assert kept["CUDA_VISIBLE_DEVICES"] == "GPU-1"


def test_another_user_is_at_home_elsewhere():
    kept = environment(HOST | {"TMPDIR": "/root/tmp"}, {}, GUEST, Path("/run/jobs/a-1"))
    assert (kept["HOME"], kept["USER"]) == ("/run/jobs/a-1", "nobody")
    assert "TMPDIR" not in kept  # a worker has a /tmp of its own
    assert environment(HOST, {}, JobUser("ada", 7, 7, "/usr"), Path("/run/jobs/a-1"))["HOME"] == "/usr"


def test_a_job_is_told_who_it_is():
    job: Any = SimpleNamespace(name="sweep-3", id=17, attempt=2, work=Work(array=(3, 8)))
    assert job_variables(job, "/runs/first", Path("/runs/first/jobs/sweep-3-17")) == {
        "PIPEFILL_JOB": "sweep-3",
        "PIPEFILL_JOB_ID": "17",
        "PIPEFILL_INDEX": "3",
        "PIPEFILL_COUNT": "8",
        "PIPEFILL_ATTEMPT": "2",
        "PIPEFILL_RUN": "/runs/first",
        "PIPEFILL_DIRECTORY": "/runs/first/jobs/sweep-3-17",
    }
    job.work = Work()  # of a job without a count
    alone = job_variables(job, "/runs/first", Path("/runs/first/jobs/sweep-3-17"))
    assert (alone["PIPEFILL_INDEX"], alone["PIPEFILL_COUNT"]) == ("0", "1")


def test_a_name_that_no_variable_can_hold_does_not_keep_a_job_from_starting():
    job: Any = SimpleNamespace(name="a\0\r\n\x1b[2J", id=17, attempt=2, work=Work())
    alone = job_variables(job, "/runs/first", Path("/runs/first/jobs/17"))
    apply_environment(alone)
    assert os.environ["PIPEFILL_JOB"] == "a\r\n\x1b[2J"
    for name in alone:
        del os.environ[name]


def test_a_task_finds_its_number_in_its_context(tmp_path):
    cases: list[tuple[tuple[int, int] | None, tuple[int, int]]] = [((3, 8), (3, 8)), (None, (0, 1))]
    for array, found in cases:
        spec = worker_spec(tmp_path, Work("m:C", array=array), "sweep-3")
        context = WorkerSpec.from_json(spec.to_json()).context()
        assert (context.index, context.count) == found
        assert (context.name, context.directory) == ("sweep-3", tmp_path)


def test_users_that_cannot_be():
    with pytest.raises(ConfigError, match="the setting user is 'no-such-user': there is no such user"):
        find_user("no-such-user")
    with pytest.raises(ConfigError, match="which is root; expected a user with fewer rights"):
        find_user("0")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run jobs as another user")
def test_a_user_by_name_or_number():
    nobody = pwd.getpwnam("nobody")
    assert find_user("nobody") == find_user(str(nobody.pw_uid))
    assert find_user("nobody").uid == nobody.pw_uid


def test_who_says_nothing_gets_a_user_without_rights_where_that_can_be(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    user = default_user()
    assert user is not None
    assert user.uid != 0
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert default_user() is None


@pytest.mark.parametrize(
    ("name", "allowed", "refused"),
    [("MODE", ["mine:*", "env:MODE"], False), ("PYTHONPATH", ["mine:*"], True), ("LD_PRELOAD", ["*", "env:M*"], True)],
)
def test_a_variable_may_bring_code_and_so_has_to_be_allowed_too(name, allowed, refused):
    reason = refusal(Work("mine:Task", env={name: "/folder"}), allowed)
    assert (f"variable {name} is not allowed here" in reason) is refused


def test_a_run_folder_that_the_user_cannot_reach_is_said_before_anything_starts(tmp_path):
    closed = tmp_path / "closed"
    (closed / "run").mkdir(parents=True)
    closed.chmod(0o700)
    with pytest.raises(ConfigError, match=rf"user nobody cannot enter .*, and so cannot use {closed}/run"):
        check_reach(GUEST, closed / "run")


@pytest.mark.parametrize(
    ("task", "allowed", "reason"),
    [
        ("mine:Task", [], ""),
        (None, [], ""),
        ("megatron.fill.sidetask.training:Digits", ["megatron.fill.sidetask.*"], ""),
        (
            "mine:Task",
            ["megatron.*", "mine:Other"],
            "mine:Task is not allowed here; the setting allow has megatron.*, mine:Other",
        ),
        ("mine:Task", ["mine:Task"], ""),
        ("command:Task", ["command"], "command:Task is not allowed here; the setting allow has command"),
        (None, ["command"], ""),
        (None, ["*"], "commands are not allowed here; the setting allow has *"),
    ],
)
def test_only_what_is_allowed_runs(task, allowed, reason):
    assert refusal(Work(task, command=None if task else ("true",)), allowed) == reason

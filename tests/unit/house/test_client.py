"""Jobs for programs."""

from __future__ import annotations

import threading
import time

import pytest

from megatron.fill.client import Jobs, JobState
from megatron.fill.errors import ConfigError, JobError
from megatron.fill.status import Status
from megatron.fill.store import Progress, open_store


@pytest.fixture
def jobs(tmp_path):
    with Jobs(tmp_path / "jobs.db") as made:
        yield made


def finish(path, name):
    store = open_store(path)
    claim = store.claim("agent", [store.find(name).id], 30.0)
    assert claim is not None
    store.finish(claim, Status(JobState.SUCCEEDED), Progress(), {"loss": 0.5})
    store.close()


def test_a_job_is_submitted_found_cancelled_and_tried_again(jobs, tmp_path, monkeypatch):
    made = jobs.submit(name="pi", task="m:Pi", args={"points": 5}, memory="2GiB")
    assert (made.state, made.work.args, made.work.memory_bytes) == (JobState.QUEUED, {"points": 5}, 2 << 30)
    assert jobs.submit(name="pi", task="m:Pi", args={"points": 5}, memory="2GiB").id == made.id
    assert jobs.cancel("pi").state is JobState.CANCELLED
    assert [job.name for job in jobs.list(JobState.CANCELLED)] == ["pi"]
    assert jobs.list(JobState.QUEUED) == []
    assert jobs.retry("pi").state is JobState.QUEUED
    assert jobs.get("pi").id == made.id


def test_tasks_are_imported_from_where_one_stands_or_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Jobs("jobs.db") as here:
        assert here.submit(name="a", task="m:A").work.search == (str(tmp_path),)
    with Jobs("jobs.db", search=["lib", "/opt/tasks"]) as there:
        assert there.submit(name="b", task="m:B").work.search == (str(tmp_path / "lib"), "/opt/tasks")


def test_a_whole_file_is_submitted(jobs, tmp_path):
    (tmp_path / "jobs.yaml").write_text("jobs: [{name: a, task: 'm:A', count: 2}, {name: b, command: 'true'}]")
    assert [job.name for job in jobs.submit_file(tmp_path / "jobs.yaml")] == ["a-0", "a-1", "b"]


def test_jobs_are_waited_for(jobs, tmp_path):
    jobs.submit(name="one", task="m:A")
    jobs.submit(name="two", task="m:A")
    finish(tmp_path / "jobs.db", "one")
    with pytest.raises(TimeoutError, match=r"not finished within 0\.05 s: two"):
        jobs.wait("one", "two", timeout_s=0.05, every_s=0.01)
    later = threading.Timer(0.2, finish, (tmp_path / "jobs.db", "two"))
    later.start()
    began_s = time.monotonic()
    done = jobs.wait("two", "one", timeout_s=60, every_s=0.01)
    later.join()
    assert time.monotonic() - began_s < 60
    assert [(job.name, job.result) for job in done] == [("two", {"loss": 0.5}), ("one", {"loss": 0.5})]
    assert jobs.wait() == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "pi"}, "job 'pi': expected exactly one of task and command"),
        ({"name": "pi", "task": "m:Pi", "memory": "much"}, "job 'pi': memory is 'much': expected a size above 0"),
        ({"task": "m:Pi"}, "job None: name is missing"),
        ({"name": "pi", "task": "m:Pi", "size": 3}, "job 'pi': unknown field size; expected one of name, task"),
        ({"name": "pi", "task": "m:Pi", "after": "pi"}, "none of these could ever begin: pi after pi"),
        ({"name": "pi", "task": "m:Pi", "count": 3}, "expected a call of submit for each job"),
    ],
)
def test_a_wrong_field_is_named(jobs, fields, message):
    with pytest.raises(ConfigError) as caught:
        jobs.submit(**fields)
    assert message in str(caught.value)
    assert jobs.list() == []


def test_another_job_of_the_same_name_is_in_the_way(jobs):
    jobs.submit(name="pi", task="m:Pi")
    with pytest.raises(JobError, match="the name 'pi' is in use by the QUEUED job"):
        jobs.submit(name="pi", task="m:Pi", args={"points": 6})
    with pytest.raises(JobError, match="there is no job 'e'"):
        jobs.get("e")

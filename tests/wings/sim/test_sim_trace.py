"""Where simulated jobs come from: traces, jobs files, job stores."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.fill.errors import ConfigError, StoreError
from megatron.fill.status import Status
from megatron.fill.store import Progress, open_store
from megatron.fill.types import JobState
from megatron.fill.wings.sim.filljobs.jobs import jobs_from_file, jobs_from_store
from megatron.fill.wings.sim.filljobs.trace import load_trace, parse_duration
from megatron.fill.wings.sim.values import SimJob
from megatron.fill.work import NewJob, Work
from tests.support.clusters import kind, profile

FAST = kind("fast", profile(1, 10, 4))  # 100 a second
SLOW = kind("slow", profile(1, 100, 4))  # 10 a second
KINDS = (FAST, SLOW)


def load(folder: Path, text: str) -> tuple[SimJob, ...]:
    path = folder / "trace.csv"
    path.write_text(text, encoding="utf-8")
    return load_trace(path, KINDS)


def test_a_trace(tmp_path):
    text = "kind,arrival,user,size,deadline,priority,name\nfast,0,ada,30,2h,1,first\n\nslow, 1.5m ,,1h,,,\n"
    assert load(tmp_path, text) == (
        SimJob(0, "first", "fast", 0.0, 3000.0, 7200.0, "ada", 1),
        SimJob(1, "slow-1", "slow", 90.0, 36000.0, None, "", 0),
    )
    assert load(tmp_path, "arrival,kind,size\n5,slow,1\n") == (SimJob(0, "slow-0", "slow", 5.0, 10.0),)


def test_points_in_time_count_from_the_earliest(tmp_path):
    text = (
        "arrival,kind,size,deadline\n2030-01-31T18:00:10,fast,1,2030-01-31T19:00:00+01:00\n"
        "2030-01-31T18:00:00Z,fast,1,90s\n"
    )
    later, first = load(tmp_path, text)
    assert (later.arrival_s, later.deadline_s) == (10.0, 0.0)
    assert (first.arrival_s, first.deadline_s) == (0.0, 90.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"trace\.csv: line 1: column 'arrival' is missing; expected arrival,kind,size"),
        ("arrival,kind,size\n", r"trace\.csv: has no jobs"),
        ("arrival,kind\n0,fast\n", "line 1: column 'size' is missing"),
        ("arrival,kind,size,dealine\n", "line 1: column 'dealine'; expected each of arrival"),
        ("arrival,kind,size,kind\n", "line 1: column 'kind'; expected each of"),
        ("arrival,kind,size\n0,fast,1\n0,quick,1\n", "line 3: kind is 'quick': expected one of fast, slow"),
        ("arrival,kind,size\n0,fast\n", "line 2: 2 fields; expected 3"),
        ("arrival,kind,size\n0,fast,\n", "line 2: size is '': expected seconds, or such as 90s"),
        ("arrival,kind,size\n0,fast,0\n", "line 2: size is '0': expected more than 0"),
        ("arrival,kind,size\n0,fast,-3\n", "line 2: size is '-3': expected seconds"),
        ("arrival,kind,size\nnan,fast,1\n", "line 2: arrival is 'nan': expected seconds, or such as 90s, 2h or 2030"),
        ("arrival,kind,size\n-1,fast,1\n", "line 2: arrival is '-1'"),
        ("arrival,kind,size\n20300131,fast,1\n2030-01-31,fast,1\n", "line 3: arrival is '2030-01-31'.*as in the lines"),
        (
            "arrival,kind,size\n2030-01-31,fast,1\n5,fast,1\n",
            "line 3: arrival is '5': expected such as 2030-01-31T18:00",
        ),
        ("arrival,kind,size,deadline\n0,fast,1,soon\n", "line 2: deadline is 'soon': expected seconds"),
        ("arrival,kind,size,deadline\n0,fast,1,2030-01-31\n", "line 2: deadline is '2030-01-31'"),
        ("arrival,kind,size,priority\n0,fast,1,high\n", "line 2: priority is 'high': expected a whole number"),
        ('arrival,kind,size\n0,"fast"x,1\n', "line 2 is not CSV"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, text)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.csv: cannot be read: No such file"):
        load_trace(tmp_path / "none.csv", KINDS)
    (tmp_path / "binary").write_bytes(b"arrival,kind,size\n\xff\xfe,fast,1\n")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load_trace(tmp_path / "binary", KINDS)


@pytest.mark.parametrize(("text", "expected"), [("90s", 90), ("30m", 1800), ("2h", 7200), ("1.5d", 129600), ("7", 7)])
def test_durations(text, expected):
    assert parse_duration(text) == expected


@pytest.mark.parametrize("text", ["", "-1", "-1s", "nan", "inf", "1w", "h", "1 h 2"])
def test_what_is_no_duration(text):
    with pytest.raises(ValueError, match="expected seconds, or such as 90s"):
        parse_duration(text)


def test_the_jobs_of_a_jobs_file(tmp_path):
    path = tmp_path / "jobs.yaml"
    path.write_text(
        "jobs:\n- {name: fast, task: m:C, priority: 2, user: ada, deadline: 2h}\n- {name: slow, task: m:D, count: 2}\n"
    )
    assert jobs_from_file(path, KINDS, 60.0)[1] == (
        SimJob(0, "fast", "fast", 0.0, 6000.0, 7200.0, "ada", 2),
        SimJob(1, "slow-0", "slow", 0.0, 600.0),
        SimJob(2, "slow-1", "slow", 0.0, 600.0),
    )
    with pytest.raises(ConfigError, match=r"jobs\.yaml: job 'slow-0' has no profile; expected a name among fast"):
        jobs_from_file(path, (FAST,), 60.0)
    path.write_text("jobs:\n- {name: zip, command: gzip file}\n")
    with pytest.raises(ConfigError, match="job 'zip' has no profile; expected a name among fast"):
        jobs_from_file(path, KINDS, 60.0)


def test_jobs_of_a_file_that_ask_for_memory_or_wait(tmp_path):
    path = tmp_path / "jobs.yaml"
    path.write_text(
        "jobs:\n- {name: fast, task: m:C, after: slow}\n- {name: slow, task: m:D, count: 2, memory: 2GiB}\n"
    )
    kinds, jobs = jobs_from_file(path, KINDS, 60.0)
    assert kinds == (FAST, replace(SLOW, name="slow (2048 MiB)", memory_bytes=2 << 30))
    assert jobs == (
        SimJob(0, "fast", "fast", 0.0, 6000.0, after=(1, 2)),
        SimJob(1, "slow-0", "slow (2048 MiB)", 0.0, 600.0),
        SimJob(2, "slow-1", "slow (2048 MiB)", 0.0, 600.0),
    )
    path.write_text("jobs:\n- {name: fast, task: m:C, after: fetch}\n")
    with pytest.raises(ConfigError, match="job 'fast' waits for 'fetch', which is not in the file"):
        jobs_from_file(path, KINDS, 60.0)


def new(name: str, task: str | None = "m:C", **values: object) -> NewJob:
    command = None if task else ("gzip",)
    return NewJob(name, Work(task, command=command), **values)  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Two jobs of one profile, one of another that does not say how much there is, and some that nobody knows."""
    path = tmp_path / "jobs.db"
    opened = open_store(path)
    submitted = opened.submit(
        [
            new("one", user="ada", priority=3, deadline_s=time.time() + 500),
            new("two"),
            new("endless", "m:E"),
            new("unknown", "m:U"),
            new("zip", None),
        ]
    )
    configurations = [its.to_dict() for its in FAST.profiles]
    opened.keep_profile(submitted[0].work.profile_key("cpu"), {"configurations": configurations, "total_work": 500.0})
    opened.keep_profile(submitted[2].work.profile_key("cpu"), {"configurations": configurations, "total_work": None})
    claim = opened.claim("agent", [submitted[1].id], 60)
    assert claim is not None
    opened.heartbeat(claim, Progress(200.0, unit="images"), 60)
    opened.close()
    return path


def test_the_jobs_of_a_store(store, caplog):
    kinds, jobs = jobs_from_store(store, "cpu")
    assert [its.name for its in kinds] == ["one"]
    assert kinds[0].alone_rate == pytest.approx(100.0)
    assert kinds[0].profiles == FAST.profiles
    assert [(its.name, its.kind, its.arrival_s, its.work) for its in jobs] == [
        ("one", "one", 0.0, 500.0),
        ("two", "one", 0.0, 300.0),
    ]
    assert (jobs[0].user, jobs[0].priority) == ("ada", 3)
    assert jobs[0].deadline_s == pytest.approx(500, abs=60)
    assert [record.getMessage().split("; ")[0] for record in caplog.records] == [
        "left out: job 'endless' does not say how much work there is in all (total_work)",
        "left out: job 'unknown' has no profile for cpu",
        "left out: job 'zip' is a command, which has no profile",
    ]


def test_the_past_of_a_store(store):
    opened = open_store(store)
    claim = opened.claim("agent", [opened.find("one").id], 60)
    assert claim is not None
    opened.finish(claim, Status(claim.job.state.SUCCEEDED), Progress(500.0), {})
    opened.cancel(opened.find("unknown").id)
    opened.close()
    assert [its.name for its in jobs_from_store(store, "cpu")[1]] == ["two"]
    _, jobs = jobs_from_store(store, "cpu", replay=True)
    assert [(its.name, its.work) for its in jobs] == [("one", 500.0), ("two", 500.0)]
    assert [its.arrival_s for its in jobs] == pytest.approx([0.0, 0.0], abs=60)


def test_jobs_of_a_store_that_ask_for_memory_or_wait(tmp_path, caplog):
    opened = open_store(tmp_path / "jobs.db")
    _, done, asks, *_ = opened.submit(
        [
            new("zip", None),
            new("done"),
            NewJob("asks", Work("m:C", memory_bytes=1 << 30)),
            NewJob("waits", Work("m:C", after=("asks", "done"))),
            NewJob("never", Work("m:C", after=("zip",))),
            NewJob("nor-it", Work("m:C", after=("never",))),
        ]
    )
    for job in (done, asks):
        content = {"configurations": [its.to_dict() for its in FAST.profiles], "total_work": 500.0}
        opened.keep_profile(job.work.profile_key("cpu"), content)
    claim = opened.claim("agent", [done.id], 60)
    assert claim is not None
    opened.finish(claim, Status(JobState.SUCCEEDED), Progress(500.0), {})
    opened.close()
    kinds, jobs = jobs_from_store(tmp_path / "jobs.db", "cpu")
    assert [(its.name, its.memory_bytes) for its in kinds] == [("asks", 1 << 30), ("waits", None)]
    assert [(its.name, its.after) for its in jobs] == [("asks", ()), ("waits", (asks.id,))]
    assert [record.getMessage() for record in caplog.records] == [
        "left out: job 'zip' is a command, which has no profile",
        "left out: job 'never' waits for 'zip', which is left out",
        "left out: job 'nor-it' waits for 'never', which is left out",
    ]
    _, jobs = jobs_from_store(tmp_path / "jobs.db", "cpu", replay=True)
    assert [(its.name, its.after) for its in jobs] == [("done", ()), ("asks", ()), ("waits", (asks.id, done.id))]


def test_a_store_without_jobs_to_simulate(store, tmp_path):
    with pytest.raises(ConfigError, match=r"no job can be simulated: job 'one' has no profile for cuda"):
        jobs_from_store(store, "cuda")
    open_store(tmp_path / "empty.db").close()
    with pytest.raises(ConfigError, match="it has no unfinished jobs"):
        jobs_from_store(tmp_path / "empty.db", "cpu")
    with pytest.raises(StoreError):
        jobs_from_store(tmp_path / "none.db", "cpu")

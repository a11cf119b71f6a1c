"""``pipefill usage``: sums by user, job and run, which add up to the total."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path

import pytest

from megatron.fill.cli import main
from megatron.fill.status import Cause, JobState, Status
from megatron.fill.store import Progress, open_store
from megatron.fill.types import Prices, Quota
from megatron.fill.work import NewJob, Work
from tests.support.segments import write_segment
from tests.support.synthetic import synthetic_run


def _done(seconds: float) -> Progress:
    """The progress of a job; that of 30 seconds was on a device without a counter of energy."""
    return Progress(1, steps=5, harvested_s=seconds, joules=None if seconds == 30 else 3.0 * seconds)


@pytest.fixture
def store(tmp_path) -> Path:
    """Four jobs of two users in two runs, of which one waits, with 10, 20 and 30 device seconds."""
    queue = open_store(tmp_path)
    for name, user, run, seconds in (("a", "ada", "r1", 10), ("b", "ada", "r2", 20), ("c", "bob", "r2", 30)):
        [job] = queue.submit([NewJob(name, Work("m:C"), user=user)])
        claim = queue.claim("agent", [job.id], 3600, f"rank 0 of {run} on host")
        assert claim is not None
        queue.finish(claim, Status(JobState.SUCCEEDED, Cause.FINISHED), _done(seconds), {})
    queue.submit([NewJob("waits", Work("m:C"), user="eve")])
    queue.close()
    return tmp_path


@pytest.fixture
def usage(store, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["pipefill", "usage", "--store", str(store), *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code, capsys.readouterr().err
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    ("by", "expected"),
    [("user", {"ada": 30, "bob": 30}), ("job", {"a": 10, "b": 20, "c": 30}), ("run", {"r1": 10, "r2": 50})],
)
def test_the_rows_add_up(usage, by, expected):
    said = json.loads(usage("--by", by, "--price", "3600", "--json"))
    assert {row[by]: row["device_s"] for row in said["rows"]} == expected
    assert said["total"] == {"jobs": 3, "running": 0, "device_s": 60, "steps": 15, "joules": 90, "cost": 60}
    assert sum(row["cost"] for row in said["rows"]) == pytest.approx(60)


def test_a_job_whose_agent_is_lost_does_not_run(usage, store):
    queue = open_store(store)
    for name, lease_s in (("held", 3600), ("lost", 1e-6)):
        [job] = queue.submit([NewJob(name, Work("m:C"), user="eve")])
        assert queue.claim("agent", [job.id], lease_s)
    queue.close()
    rows = {row["user"]: row for row in json.loads(usage("--json"))["rows"]}
    assert (rows["eve"]["jobs"], rows["eve"]["running"]) == (2, 1)


def test_the_table_fits_80_columns(usage):
    out = usage()
    assert max(map(len, out.splitlines())) <= 80
    assert out.split()[-5:] == ["3", "0", "60.0", "15", "90"]


def test_it_shows_who_runs_what_and_the_quota(usage, store):
    write_segment(store / "r3", synthetic_run()[0][:2], quota=Quota(jobs=2, device_hours=1.5))
    queue = open_store(store)
    assert queue.claim("agent", [queue.find("waits").id], 3600, f"rank 0 of {store}/r3 on host")
    queue.close()
    said = usage()
    assert ["eve", "1", "1", "0.0", "0", "-"] in [line.split() for line in said.splitlines()]
    assert f"quota of each user in {store}/r3: at most 2 running, 1.5 device-hours in 30 days" in said
    assert json.loads(usage("--json"))["quotas"][f"{store}/r3"] == {"jobs": 2, "device_hours": 1.5, "days": 30}


def test_csv_has_a_head(usage):
    rows = list(csv.reader(io.StringIO(usage("--csv", "--since", "1d"))))
    assert rows[0] == ["user", "jobs", "running", "device_s", "steps", "joules", "cost"]
    assert len(rows) == 3


def test_a_user_of_any_name_has_one_line(usage, store):
    queue = open_store(store)
    for name, user in (("d", "all"), ("e", "ev\x1b[2Jil\nada")):
        [job] = queue.submit([NewJob(name, Work("m:C"), user=user)])
        claim = queue.claim("agent", [job.id], 3600, "rank 0 of r1 on host")
        assert claim is not None
        queue.finish(claim, Status(JobState.SUCCEEDED, Cause.FINISHED), _done(40), {})
    queue.close()
    lines = usage().splitlines()
    assert [line.split()[0] for line in lines[1:]].count("all") == 2
    lines = usage("--csv").split("\n")
    assert "\r" not in lines[0]
    assert any(line.startswith("ev [2Jil ada,1,0,40") for line in lines)


def test_a_run_says_what_its_devices_cost(usage, store, monkeypatch, capsys):
    assert "COST" not in usage()
    monkeypatch.chdir(store)
    write_segment(store / "r1", synthetic_run()[0][:2], prices=Prices(main=7200, side=1))
    assert {row["run"]: row["cost"] for row in json.loads(usage("--by", "run", "--json"))["rows"]} == {
        "r1": pytest.approx(10),  # half of 7200 an hour for each of two devices
        "r2": None,
    }
    assert usage("--by", "run").split()[-5:] == ["0", "60.0", "15", "90", "10.0000"]
    assert {row["run"]: row["cost"] for row in json.loads(usage("--by", "run", "--json", "--price", "0"))["rows"]} == {
        "r1": 0,
        "r2": 0,
    }


def test_what_has_no_price_is_said(store, monkeypatch, capsys):
    monkeypatch.chdir(store)
    write_segment(store / "r1", [], prices=Prices(main=7200, side=1), ranks=2)
    monkeypatch.setattr(sys, "argv", ["pipefill", "usage", "--store", str(store)])
    with pytest.raises(SystemExit):
        main()
    assert "the cost lacks 2 of 3 jobs, whose runs have no setting price or are gone" in capsys.readouterr().err

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.fill.errors import FillError
from megatron.fill.records import read_agent, read_rank, write_agent, write_rank
from megatron.fill.types import BrakeEvent, BubbleKind, JobRecord, JobState
from tests.unit.synthetic import synthetic_run


def test_rank_round_trip(tmp_path: Path) -> None:
    for record in synthetic_run()[0]:
        path = tmp_path / "ranks" / f"rank{record.info.rank}.json"
        write_rank(path, record)
        read = read_rank(path)
        assert read == record
        assert all(type(bubble.kind) is BubbleKind for bubble in read.bubbles)


def test_brakes_round_trip(tmp_path: Path) -> None:
    record = replace(synthetic_run()[0][0], brakes=[BrakeEvent(4, 0.031, 8, 80, 2_000_000)])
    write_rank(tmp_path / "rank0.json", record)
    assert read_rank(tmp_path / "rank0.json") == record


def test_agent_round_trip(tmp_path: Path) -> None:
    _, workers, jobs = synthetic_run()
    path = tmp_path / "agent0.json"
    write_agent(path, workers, jobs)
    assert read_agent(path) == (workers, jobs)
    assert type(read_agent(path)[1][0].state) is JobState


def test_empty_agent(tmp_path: Path) -> None:
    write_agent(tmp_path / "agent0.json", [], [])
    assert read_agent(tmp_path / "agent0.json") == ([], [])


def test_a_result_that_json_lacks_is_kept_as_text(tmp_path: Path) -> None:
    job = JobRecord("a", "m:C", JobState.SUCCEEDED, "", 1.0, "images", result={"at": Path("x/y")})
    write_agent(tmp_path / "agent0.json", [], [job])
    assert read_agent(tmp_path / "agent0.json")[1][0].result == {"at": "x/y"}


def test_nothing_else_is_left_behind(tmp_path: Path) -> None:
    ranks, workers, jobs = synthetic_run()
    write_rank(tmp_path / "rank0.json", ranks[0])
    write_rank(tmp_path / "rank0.json", ranks[1])
    write_agent(tmp_path / "agent0.json", workers, jobs)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["agent0.json", "rank0.json"]
    assert read_rank(tmp_path / "rank0.json") == ranks[1]


def test_rows_are_compact(tmp_path: Path) -> None:
    ranks, _, _ = synthetic_run()
    write_rank(tmp_path / "rank0.json", ranks[0])
    content = json.loads((tmp_path / "rank0.json").read_text())
    assert content["bubbles"]["columns"][:3] == ["iteration", "index", "kind"]
    assert content["bubbles"]["rows"][0][:3] == [1, 0, "fwd-bwd"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 99}, "has version 99; this PipeFill reads 2"),
        ({"kind": "agent"}, "is not the record of a PipeFill rank"),
        ({"bubbles": {"columns": ["a"], "rows": []}}, "is damaged"),
        ({"info": {"rank": 0}}, "is damaged"),
        ({"spans": None}, "is damaged"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, change: dict, message: str) -> None:
    path = tmp_path / "rank0.json"
    write_rank(path, synthetic_run()[0][0])
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(FillError, match=message) as caught:
        read_rank(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "\udcff"])
def test_what_is_not_json_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "agent0.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(FillError, match=r"agent0\.json"):
        read_agent(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FillError, match=r"rank7\.json: cannot be read"):
        read_rank(tmp_path / "rank7.json")

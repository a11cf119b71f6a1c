"""Schedules in torch's CSV form: round trips, and errors with their place."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.fill.cli.schedule import _MOST_FORWARDS
from megatron.fill.errors import ConfigError
from megatron.fill.pipeline.schedule import Schedule
from megatron.fill.pipeline.schedules import NAMES, make_schedule, usual_chunks
from megatron.fill.pipeline.torch_csv import _MOST_BYTES, dump_csv, load_csv

EXAMPLES = sorted((Path(__file__).parents[3] / "examples" / "schedules").glob("*.csv"))


@pytest.mark.parametrize("name", NAMES)
def test_a_file_round_trips(name: str, tmp_path: Path):
    path = tmp_path / f"{name}.csv"
    schedule = make_schedule(name, 4, 8, usual_chunks(name))
    dump_csv(path, schedule)
    assert load_csv(path) == schedule


def assert_torch_runs(path: Path, schedule: Schedule, again: Path) -> None:
    """Torch validates the file, and adds transfers; what it writes is the same schedule."""
    runtime = pytest.importorskip("torch.distributed.pipelining.schedules")._PipelineScheduleRuntime
    stage = SimpleNamespace(num_stages=schedule.virtual_stages, group_size=schedule.stages, group_rank=0)
    theirs = runtime([stage], schedule.microbatches)
    theirs._load_csv(str(path), format="compute_only")
    assert theirs.stage_index_to_group_rank == dict(enumerate(schedule.placement))
    theirs._dump_csv(str(again), format="compute_comms")
    assert "RECV_F" in again.read_text()
    assert load_csv(again) == schedule


@pytest.mark.parametrize("name", NAMES)
def test_torch_reads_a_file_and_is_read_with_its_transfers(name: str, tmp_path: Path):
    schedule = make_schedule(name, 4, 8, usual_chunks(name))
    path = tmp_path / f"{name}.csv"
    dump_csv(path, schedule)
    assert_torch_runs(path, schedule, path)


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_the_examples_are_schedules_that_torch_runs(path: Path, tmp_path: Path):
    schedule = load_csv(path)
    assert_torch_runs(path, schedule, tmp_path / path.name)
    if path.stem in NAMES:
        assert schedule == make_schedule(path.stem, 8, 32, schedule.chunks)
    else:
        assert (path.stem, schedule.stages, schedule.microbatches) == ("zb-h2", 8, 32)


def test_transfers_and_empty_cells_are_left_out(tmp_path: Path):
    path = tmp_path / "own.csv"
    first = "0UNSHARD,0F0,0SEND_F0,,0RECV_B0,0WAIT_SEND_F0,0B0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD"
    path.write_text(f"{first}\n,1RECV_F0,1F0,1I0,1SEND_B0,1W0,1WAIT_SEND_B0\n")
    assert str(load_csv(path)).splitlines()[1:] == ["0: F0 B0", "1: F0 I0 W0"]


@pytest.mark.parametrize("cell", ["(0F1;0B0)OVERLAP_F_B", "( 0F1; 0B0 )OVERLAP_F_B", "(0B0;0F1)OVERLAP_F_B"])
def test_two_passes_as_one_action_are_read_as_torch_reads_them(cell: str, tmp_path: Path):
    action = pytest.importorskip("torch.distributed.pipelining.schedules")._Action.from_str(cell)
    (tmp_path / "own.csv").write_text(f"0F0,{cell},0B1\n")
    schedule = load_csv(tmp_path / "own.csv")
    dump_csv(tmp_path / "own.csv", schedule)
    assert (tmp_path / "own.csv").read_text() == f"0F0,{action},0B1\n"


def test_a_file_of_a_spreadsheet_is_read(tmp_path: Path):
    """It begins with a mark of the encoding, and may end with empty lines, with commas or without."""
    path = tmp_path / "own.csv"
    path.write_bytes(b"\xef\xbb\xbf0F0,0B0\r\n1F0,1B0\r\n,\r\n\r\n")
    assert str(load_csv(path)).splitlines()[1:] == ["0: F0 B0", "1: F0 B0"]


def test_the_longest_file_that_is_written_can_be_read():
    """A forward and a backward pass as one action take the most bytes; stage and microbatch have seven digits then."""
    assert len("(1F149999;0B149999)OVERLAP_F_B,") * _MOST_FORWARDS <= _MOST_BYTES


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "own.csv: it is empty: expected a line per rank"),
        ("0F0,0B0\n\n1F0,1B0\n", "own.csv, line 2: it has no pass: expected the actions of rank 1"),
        ("0F0,0X0\n", "own.csv, line 1, cell 2: '0X0' is not an action: expected such as 0F1"),
        ("0F" + "1" * 5000, "own.csv, line 1, cell 1: '0F111"),
        ("x" * 200_000, "own.csv: is not CSV: field larger than field limit"),
        ("0F0,(0B0;0X1)OVERLAP_F_B\n", "own.csv, line 1, cell 2: '(0B0;0X1)OVERLAP_F_B' is not an action: expected"),
        ("0F0,0F0,0B0\n", "own.csv, line 1, cell 2: F0 runs twice"),
        ("0F0,,0B0,0F2,0B2\n", "line 1: F1 is missing; the last microbatch is 2, in line 1, cell 4"),
        ("0F0,0B0\n1F1,1B1\n", "line 1: F1 is missing; the last microbatch is 1, in line 2, cell 1"),
        ("0F0,,0B1,0F1\n", "own.csv, line 1, cell 3: B1 runs before its forward pass"),
        ("0F0,0W0\n", "own.csv, line 1, cell 2: W0 runs before its I pass"),
        ("0F0,0B0\n7F0,7B0\n", "own.csv, line 2, cell 1: stage 7 is unknown: expected 0 to 1"),
        ("0F0,0B0\n0F0,1F0\n", "own.csv, line 2, cell 1: stage 0 is on rank 1: expected it on rank 0 only"),
        ("0F0,1F0,1B0,0B0\n2F0,2B0\n", "own.csv, line 1: rank 0 has 2 of 3 stages: expected as many on each"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", "own.csv, line 1, cell 2: it cannot be executed: a cycle: rank 0 at B0"),
        (
            "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,(1B0;1F1)OVERLAP_F_B,1B1\n",
            "line 1, cell 2: it cannot be executed: a cycle: rank 0 at (F1;B0) waits for (B0;F1) of rank 1;",
        ),
    ],
)
def test_an_error_has_its_place(text: str, message: str, tmp_path: Path):
    (tmp_path / "own.csv").write_text(text)
    with pytest.raises(ConfigError) as error:
        load_csv(tmp_path / "own.csv")
    assert message in str(error.value)
    assert len(str(error.value)) < 400

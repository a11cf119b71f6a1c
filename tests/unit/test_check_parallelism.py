"""``scripts/benchmarks/check_parallelism.py``: its table, and wrong calls of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.benchmarks.check_parallelism import ROWS, Checked, Row, earlier, line, stages, write

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "benchmarks" / "check_parallelism.py"
WELL = Checked(4, "--flag", 8, 0.25, (3, 5, 9, 9), identical=True, stages_right=True, peers_alike=True)


def test_a_row_is_well_only_if_every_rank_stepped():
    assert WELL.well
    assert not Checked(4, "", 8, 0.25, (3, 5, 0, 9), identical=True, stages_right=True, peers_alike=True).well
    assert not Checked(4, "", 8, 0.25, (3, 5, 9, 9), identical=False, stages_right=True, peers_alike=True).well
    assert "DIFFERENT LOSSES PEERS DIFFER" in line("row", Checked(2, "", steps=(1, 1), stages_right=True))


def test_stages_in_both_orders_of_megatron():
    assert stages(ROWS["tensor-data"]) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert stages(ROWS["tensor-pipeline-data-order"]) == [0, 0, 1, 1, 0, 0, 1, 1]
    assert stages(Row(2)) == [0, 1]


def test_the_file_keeps_rows(tmp_path):
    path = tmp_path / "new.json"
    assert earlier(path) == {}
    write(path, {"one": {"error": "", "identical": True, "iterations": 8}, "two": {"error": "no", "identical": False}})
    assert list(earlier(path)) == ["one", "two"]
    summary = json.loads(path.read_text())["summary"]
    assert summary == {"trained": 1, "identical": 1, "iterations": 8, "refused_by_megatron": 1}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rows", "none"], "argument --rows: invalid choice: 'none'"),
        (["--rows"], "argument --rows: expected at least one argument"),
        (["--json", "/proc/none.json"], "--json /proc/none.json: "),
        (["--json", str(SCRIPT)], "is not of this script; expected a file that it wrote, or a new one"),
        (["--keep", str(SCRIPT.parent)], "File exists; expected a new folder that can be made"),
    ],
)
def test_wrong_calls(arguments, said):
    done = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr

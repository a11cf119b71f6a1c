"""``python -m tests.parallelism.check``: its table, and wrong calls of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.parallelism.check import Checked, earlier, line, model, seen, stages, write
from tests.parallelism.probe import COUNTED
from tests.parallelism.rows import ROWS, AtLeast, Has, Row, Stages, at, unmet

HERE = Path(__file__).parent
# Written by the ranks of step-batch-size-schedule: nothing of it but the batch is as in another row.
PLAIN = json.loads(Path(__file__).with_name("plain_training.json").read_text(encoding="utf-8"))
RIGHT: dict[str, Any] = {"identical": True, "stages_right": True, "peers_alike": True, "unmet": ()}
WELL = Checked(4, "--flag", 8, 0.25, (3, 5, 9, 9), **RIGHT)


def test_a_row_is_well_only_if_every_rank_stepped():
    assert WELL.well
    assert not Checked(4, "", 8, 0.25, (3, 5, 0, 9), **RIGHT).well
    assert not Checked(4, "", 8, 0.25, (3, 5, 9, 9), **RIGHT | {"identical": False}).well
    assert not Checked(4, "", 8, 0.25, (3, 5, 9, 9), **RIGHT | {"unmet": ("a is 1; expected 2",)}).well
    assert "NO EFFECT: a is 1" in line("row", Checked(2, "", steps=(1, 1), **RIGHT | {"unmet": ("a is 1",)}))
    assert "DIFFERENT LOSSES PEERS DIFFER" in line("row", Checked(2, "", steps=(1, 1), stages_right=True))


@pytest.mark.parametrize("name", ROWS)
def test_a_training_without_its_flags_does_not_pass_for_a_row(name):
    constant = {"forwards": [8] * 50, "batch_changes": 0}
    assert ROWS[name].expected
    assert unmet(ROWS[name].expected, [rank | constant for rank in PLAIN])


def test_a_training_with_its_flags_passes():
    assert unmet(ROWS["step-batch-size-schedule"].expected, PLAIN) == []


@pytest.mark.parametrize("name", ROWS)
def test_every_count_that_a_row_needs_is_made(name):
    counts = {path.removeprefix("calls.") for path in ROWS[name].expected if path.startswith("calls.")}
    assert counts <= set(COUNTED)


def test_expectations():
    ranks = [{"stage": 0, "layers": [1], "modules": ["A"]}, {"stage": 1, "layers": [2], "modules": ["A", "B"]}]
    assert unmet({"layers": Stages([1], [2]), "layers.0": AtLeast(1), "modules": Has("A")}, ranks) == []
    assert unmet({"layers.0": 1}, ranks) == ["layers.0 of rank 1 is 2; expected 1"]
    assert unmet({"modules": Has("B")}, ranks) == ["modules of rank 0 is ['A']; expected Has(part='B')"]
    assert unmet({"calls.none": AtLeast(0)}, ranks[:1]) == ["calls.none of rank 0 is None; expected AtLeast(least=0)"]
    assert unmet({}, ranks) == ["nothing is expected of this row"]
    assert unmet({"layers": [1]}, []) == ["no rank wrote what it trains"]


def test_what_ranks_wrote_is_read_in_their_order(tmp_path):
    for rank in (1, 0):
        (tmp_path / f"facts-{rank}.json").write_text(json.dumps({"groups": {"tensor": rank}}))
    assert [at(facts, "groups.tensor") for facts in seen(tmp_path)] == [0, 1]


def test_flags_are_split_as_in_a_shell_and_replace_the_models():
    words = model(ROWS["step-batch-size-schedule"])
    assert words[words.index("--step-batch-size-schedule") + 1] == "0:2 2K:4 8K:8"
    assert "--global-batch-size" not in words
    assert "--global-batch-size" in model(Row(2))


def test_stages_in_both_orders_of_megatron():
    assert stages(ROWS["tensor-data"]) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert stages(ROWS["tensor-pipeline-data-order"]) == [0, 0, 1, 1, 0, 0, 1, 1]
    assert stages(Row(2)) == [0, 1]


def test_the_file_keeps_rows(tmp_path):
    path = tmp_path / "new.json"
    assert earlier(path) == {}
    right = {"error": "", "identical": True, "iterations": 8}
    write(path, {"one": right, "two": {"error": "no", "identical": False}, "three": right | {"unmet": []}})
    assert list(earlier(path)) == ["one", "two", "three"]
    summary = json.loads(path.read_text())["summary"]
    counts = {"trained": 2, "identical": 2, "iterations": 16, "refused_by_megatron": 1, "shown_to_have_effect": 1}
    assert summary == counts


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rows", "none"], "argument --rows: invalid choice: 'none'"),
        (["--rows"], "argument --rows: expected at least one argument"),
        (["--json", "/proc/none.json"], "--json /proc/none.json: "),
        (["--json", __file__], "is not of this script; expected a file that it wrote, or a new one"),
        (["--keep", str(HERE)], "File exists; expected a new folder that can be made"),
    ],
)
def test_wrong_calls(arguments, said):
    command = [sys.executable, "-m", "tests.parallelism.check", *arguments]
    done = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr

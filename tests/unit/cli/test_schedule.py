"""``pipefill schedule``: figures of known schedules, and files that are written and read again."""

from __future__ import annotations

import json
import sys

import pytest

from megatron.fill.cli import main
from megatron.fill.pipeline.bubbles import ideal_bubble_share
from megatron.fill.pipeline.schedules import NAMES


@pytest.fixture
def schedule(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["pipefill", "schedule", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code, capsys.readouterr().err
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 4)])
def test_the_share_is_that_of_the_closed_form(schedule, name, chunks):
    found = json.loads(schedule(name, "--stages", "4", "--microbatches", "8", "--chunks", str(chunks), "--json"))
    assert found["bubble_share"] == pytest.approx(ideal_bubble_share(4, 8, chunks))
    assert found["iteration_ms"] == pytest.approx(24 / (1 - found["bubble_share"]))


@pytest.mark.parametrize("name", NAMES)
def test_kinds_add_up_and_a_file_has_the_same_figures(schedule, name):
    times = "--times", "10,12,8.5", "--transfer", "0.5", "--json"
    made = json.loads(schedule(name, "--stages", "4", "--microbatches", "8", "--csv", "own.csv", *times))
    for row in made["ranks"]:
        kinds_ms = sum(row[f"{kind}_ms"] for kind in ("fill", "fwd-bwd", "interior", "drain"))
        assert kinds_ms == pytest.approx(row["bubble_share"] * made["iteration_ms"])
        assert 8 * 30.5 + kinds_ms == pytest.approx(made["iteration_ms"])
    assert json.loads(schedule("own.csv", *times)) == made | {"schedule": "own"}


def test_the_table_fits_80_columns(schedule):
    out = schedule("zb-h1", "--stages", "4", "--microbatches", "8", "--times", "2345.67,3456.78,1234.5")
    assert max(map(len, out.splitlines())) <= 80
    assert out.startswith(
        "zb-h1: stages 4, microbatches 8, chunks 1\niteration 69,999 ms, bubbles 19.6%, fillable 19.6%\n"
    )


def test_short_bubbles_are_not_fillable(schedule):
    """Rank 2 of three waits 2 ms for its first forward pass; ranks 0 and 1 wait 2 and 1 ms for backward passes."""
    found = json.loads(schedule("zb-h1", "--stages", "3", "--microbatches", "6", "--min-bubble", "1.5", "--json"))
    assert [(row["bubbles"], row["longest_ms"]) for row in found["ranks"]] == [(1, 2), (2, 1), (1, 2)]
    assert [row["fillable_share"] for row in found["ranks"]] == pytest.approx([2 / 20, 0, 2 / 20])

"""``pipefill schedule``: figures of known schedules, and files that are written and read again."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.fill.cli import main
from megatron.fill.pipeline.schedules import NAMES
from tests.support.schedule_events import ideal_bubble_share

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "schedules.md").read_text(encoding="utf-8")
MEASURED = "--times", "29.802,29.428,19.530", "--transfer", "0.577", "--min-bubble", "5"


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


def rows(heading: str) -> dict[str, list[str]]:
    """The cells of a section's table, by the schedule's name."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    found = re.findall(r"^\| `([\w-]+)` \| (.*) \|$", section, re.MULTILINE)
    assert {name for name, _ in found} == set(NAMES)
    return {name: cells.split(" | ") for name, cells in found}


@pytest.mark.parametrize("name", NAMES)
def test_the_page_has_the_figures(schedule, name):
    for cell, (stages, microbatches) in zip(
        rows("Bubbles of equal passes")[name], (("4", "8"), ("4", "32"), ("8", "8"), ("8", "32")), strict=True
    ):
        if cell != "-":
            found = json.loads(schedule(name, "--stages", stages, "--microbatches", microbatches, "--json"))
            assert cell == f"{found['bubble_share']:.1%}"
    found = json.loads(schedule(name, "--stages", "8", "--microbatches", "32", *MEASURED, "--json"))
    longest_ms = [row["longest_ms"] for row in found["ranks"]]
    assert rows("Bubbles of measured passes")[name] == [
        f"{found['iteration_ms']:,.0f}",
        f"{found['bubble_share']:.1%}",
        f"{found['fillable_share']:.1%}",
        f"{min(longest_ms):.0f} to {max(longest_ms):.0f}",
        f"{max(row['peak_activations'] for row in found['ranks']):.3g}",
    ]


def test_the_schedule_of_the_page_is_faster_than_1f1b(schedule):
    [script] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    subprocess.run([sys.executable, "-c", script], check=True)
    own = json.loads(schedule("own.csv", *MEASURED, "--json"))
    assert f"It takes {own['iteration_ms']:,.0f} ms an iteration" in PAGE
    assert max(row["peak_activations"] for row in own["ranks"]) == 15


def test_the_page_shows_what_is_printed(schedule):
    printed = [line.rstrip() for line in schedule("zb-h1", "--stages", "4", "--microbatches", "8").splitlines()]
    assert "\n".join(printed) in PAGE

"""What a training says at its end."""

from __future__ import annotations

import pytest

from megatron.fill.app.closing import report_end
from megatron.fill.config import FillSettings
from megatron.fill.records.segment import last_segment
from tests.support.segments import write_segment
from tests.support.synthetic import synthetic_run

FILES = "PipeFill: report.json, trace.json and timeline.png in {run}"
PAGE = "  pipefill report '{run}' --html '{run}/report.html'"


@pytest.mark.parametrize(
    ("settings", "commands"),
    [
        (
            FillSettings(store="my store"),
            [PAGE, "  pipefill list --store 'my store'", "  pipefill usage --by job --store 'my store'"],
        ),
        (FillSettings(report="my run"), [PAGE]),
    ],
)
def test_on_a_terminal_it_ends_with_the_commands_that_one_wants_next(tmp_path, monkeypatch, capsys, settings, commands):
    run = tmp_path / "my run"
    write_segment(run, synthetic_run()[0])
    segment = last_segment(run)
    report_end(settings, run, segment, {})
    assert capsys.readouterr().out.splitlines()[-1] == FILES.format(run=run)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    report_end(settings, run, segment, {})
    said = capsys.readouterr().out.splitlines()[-len(commands) - 2 :]
    assert said == [FILES.format(run=run), "Next:", *(command.format(run=run) for command in commands)]

"""The figures that an agent leaves for Megatron's writers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron.fill.pages.control import ControlPage
from megatron.fill.types import RankRecord
from megatron.fill.wings.operate.figures import ShownFigures
from tests.support.segments import write_segment
from tests.support.synthetic import report_of, synthetic_run


def with_one_unwatched(rank: RankRecord) -> RankRecord:
    """The rank's record with an iteration whose bubbles are not known, so that neither may its time count."""
    at = rank.iterations[3].iteration
    iterations = [replace(one, watched=one.iteration != at) for one in rank.iterations]
    return replace(rank, iterations=iterations, bubbles=[one for one in rank.bubbles if one.iteration != at])


def test_they_are_those_of_the_whole_run_once_the_rank_has_asked(tmp_path: Path) -> None:
    ranks, workers, jobs = synthetic_run()
    ranks = [with_one_unwatched(rank) for rank in ranks]
    named = {job.name: job for job in jobs}
    write_segment(tmp_path, ranks, [(named[one.job], one) for one in workers], ending=None)
    control = ControlPage.create(0)
    figures = ShownFigures(tmp_path, control)
    figures.keep()
    assert control.ask() == {}  # nothing was shown before
    figures.keep()
    total, found = report_of(ranks, workers, jobs).total, control.ask()
    assert found["bubble_share"] == pytest.approx(total.bubble_share)
    assert found["harvest_ratio"] == pytest.approx(total.harvest_ratio)
    assert found["jobs_done"] == sum(job.state == "SUCCEEDED" for job in jobs)
    assert "slowdown" not in found  # of so few iterations it is not known

"""Bubbles that pass while jobs set themselves up are in no ratio, in runs with paired blocks and without."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from megatron.fill.pages.gate import SharedGate
from megatron.fill.rank.blocks import Blocks
from megatron.fill.rank.listener import RankListener
from megatron.fill.rank.predictor import BubblePredictor
from megatron.fill.rank.recorder import Recorder
from megatron.fill.rank.rule import FillRule
from megatron.fill.records.rank import read_rank
from megatron.fill.report import print_report
from megatron.fill.report.timeuse import TimeUse
from megatron.fill.types import MOST_SETTLING, RankInfo
from tests.support.segments import write_rank
from tests.support.synthetic import is_filling, report_of, synthetic_run

INFO = RankInfo(0, 2, 0, 2, 0, 1, 0, 2)
WARMUP = 2


class Switch:
    running = True
    settled = False


def listened(iterations: int, settled_at: int | None, paired_blocks: int = 0) -> Recorder:
    switch, recorder = Switch(), Recorder(INFO, 3)
    listener = RankListener(
        SharedGate(),
        recorder,
        BubblePredictor(FillRule(WARMUP)),
        lambda: 0,
        paired_blocks=paired_blocks,
        control=switch,
    )
    for number in range(1, iterations + 1):
        switch.settled = settled_at is not None and number >= settled_at
        listener.iteration_started(number, number)
        listener.iteration_ended(number)
    return recorder


@pytest.mark.parametrize(
    ("settled_at", "paired_blocks", "settled_after"),
    [
        (6, 0, 5),
        (6, 2, 6),  # with the next pair
        (2, 0, 0),  # in the warm-up, in which nothing is filled
        (None, 0, 0),  # it never came
    ],
)
def test_a_rank_says_after_which_iteration_jobs_had_settled(settled_at, paired_blocks, settled_after):
    assert listened(12, settled_at, paired_blocks).record().settled_after == settled_after


def test_it_does_not_wait_for_ever():
    last = WARMUP + MOST_SETTLING
    assert listened(last + 2, None).record().settled_after == last
    blocks = Blocks(0, 0, lambda: False)
    for _ in range(MOST_SETTLING + 2):
        blocks.iteration_started()
    assert (blocks.number, blocks.begun, blocks.watched) == (-1, True, True)


def test_it_is_written_down_and_read(tmp_path: Path) -> None:
    record = replace(synthetic_run()[0][0], settled_after=5)
    write_rank(tmp_path / "rank0.jsonl", record)
    assert read_rank(tmp_path / "rank0.jsonl") == record
    write_rank(tmp_path / "more.jsonl", replace(record, settled_after=0))
    assert read_rank(tmp_path / "rank0.jsonl", tmp_path / "more.jsonl").settled_after == 5


def test_what_passed_before_is_in_no_ratio():
    ranks, workers, jobs = synthetic_run()
    whole = report_of(ranks, workers, jobs)
    last = next(number for number in range(10, 0, -1) if is_filling(number)) - 2
    report = report_of([replace(record, settled_after=last) for record in ranks], workers, jobs)
    for rank, before in zip(report.ranks, whole.ranks, strict=True):
        assert 0 < rank.fillable_s < before.fillable_s
        assert rank.fillable_s + rank.settling_s == pytest.approx(before.fillable_s)
        assert sum(rank.time_use_ns.values()) == round(rank.fillable_s * 1e9)
        assert rank.harvested_s is not None
        assert rank.time_use_ns[TimeUse.STEPS] == round(rank.harvested_s * 1e9)
        assert rank.harvest_ratio == pytest.approx(before.harvest_ratio, abs=0.05)  # every bubble is filled alike
        assert [work.steps for work in rank.work] == [work.steps for work in before.work]
    assert report.total.settling_s == pytest.approx(sum(rank.settling_s for rank in report.ranks))
    assert report.summary.fill_efficiency == pytest.approx(whole.summary.fill_efficiency, rel=0.2)
    assert whole.total.settling_s == 0
    console = Console(file=StringIO(), width=120)
    print_report(report, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"bubbles that passed while jobs started, in no ratio: {report.total.settling_s:.2f} s" in text

"""Waits outside the pipeline in the report: by kind, in the harvest, and in no figure of the pipeline's bubbles."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from megatron.fill.report import Report, print_report
from megatron.fill.report.schema import Outside
from megatron.fill.types import Bubble, BubbleKind, BubbleUse
from tests.support.synthetic import MS, report_of, synthetic_run

SEQ = 999


def report(with_waits: bool, times: int = 1) -> Report:
    """Of the synthetic run: its first rank also waits in two saves after its last iteration, and fills the second.

    Args:
        times: how many times as long as 50 ms and 40 ms they are.
    """
    ranks, workers, jobs = synthetic_run()
    if with_waits:
        first, worker = ranks[0], workers[0]
        last = first.iterations[-1]
        end_ns = last.end_ns
        number = last.iteration
        ms = times * MS
        waits = [
            Bubble(number, 0, BubbleKind.SAVE, end_ns, end_ns + 50 * ms),
            Bubble(number, 1, BubbleKind.SAVE, end_ns + 50 * ms, end_ns + 90 * ms, 30 * ms, SEQ, filling=True),
        ]
        use = BubbleUse(SEQ, 0, 28 * ms, 0, 7, end_ns + 78 * ms)
        ranks[0] = replace(first, bubbles=[*first.bubbles, *waits])
        workers[0] = replace(worker, harvested_ns=worker.harvested_ns + 28 * ms, uses=[*worker.uses, use])
    return report_of(ranks, workers, jobs)


def test_they_are_told_apart_by_kind():
    total = report(with_waits=True).total
    assert total.outside == {BubbleKind.SAVE: Outside(total_s=0.09, fillable_s=0.04, harvested_s=0.028)}
    assert sum(total.time_use_ns.values()) == round(total.fillable_s * 1e9)


def test_they_count_in_the_harvest_and_in_nothing_of_the_pipeline():
    plain, its = report(with_waits=False), report(with_waits=True)
    assert its.total.fillable_s == pytest.approx(plain.total.fillable_s + 0.04)
    assert plain.total.harvested_s is not None
    assert its.total.harvested_s == pytest.approx(plain.total.harvested_s + 0.028)
    for name in ("bubble_s", "bubble_share", "evaluation_bubble_s", "predicted_bubbles", "prediction_error_ms"):
        assert getattr(its.total, name) == getattr(plain.total, name)
    assert its.cycle == plain.cycle
    assert plain.total.outside == {}


def test_the_table_says_how_much_was_used():
    console = Console(file=io.StringIO(), width=200)
    print_report(report(with_waits=True, times=10), console)
    assert isinstance(console.file, io.StringIO)
    said = "save: waited for 0.9 s outside the pipeline; used 0.3 s of the 0.4 s that could be filled"
    assert said in console.file.getvalue()


def test_the_table_does_not_say_that_nothing_could_be_filled():
    console = Console(file=io.StringIO(), width=200)
    print_report(report(with_waits=True), console)
    assert isinstance(console.file, io.StringIO)
    assert "outside the pipeline" not in console.file.getvalue()

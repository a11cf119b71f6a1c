from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from megatron.fill.display import STATE_COLOURS
from megatron.fill.report import Report, print_report
from megatron.fill.report.cycle import bubble_cycle, write_cycles
from megatron.fill.report.schema import Awaited, Cycles
from megatron.fill.report.seen import seen
from megatron.fill.report.terminal import print_cycle
from megatron.fill.status import Status
from megatron.fill.types import BrakeEvent, BubbleKind, JobRecord, JobState, RankRecord
from tests.support.synthetic import LAST, MS, report_of, synthetic_run


def test_cycle() -> None:
    first, second = (bubble_cycle(seen(record)) for record in synthetic_run()[0])
    assert [bubble.kind for bubble in first.training] == [BubbleKind.FWD_BWD, BubbleKind.INTERIOR]
    bubble = first.training[1]
    assert (bubble.index, bubble.count, bubble.free_bytes) == (1, LAST - 1, 3 << 30)
    assert (bubble.mean_ms, bubble.median_ms, bubble.p10_ms, bubble.p90_ms) == pytest.approx((10, 10, 10, 10))
    assert bubble.offset_ms == pytest.approx(60)
    assert first.iteration_ms == pytest.approx(904 / 9)
    assert bubble.share == pytest.approx(90 / 904)
    assert first.evaluation == []
    assert [(bubble.kind, bubble.count) for bubble in second.evaluation] == [(BubbleKind.FILL, 2)]
    assert second.evaluation[0].share is None


def test_cycle_of_the_most_common_length() -> None:
    record = synthetic_run()[0][0]
    odd = [bubble for bubble in record.bubbles if (bubble.iteration, bubble.index) != (5, 1)]
    assert [bubble.count for bubble in bubble_cycle(seen(replace(record, bubbles=odd))).training] == [LAST - 2] * 2


def test_cycle_of_one_iteration_and_of_none() -> None:
    record = synthetic_run()[0][0]
    one = replace(record, iterations=record.iterations[:1])
    assert [bubble.count for bubble in bubble_cycle(seen(one)).training] == [1, 1]
    none = bubble_cycle(seen(replace(record, iterations=[], bubbles=[])))
    assert (none.training, none.evaluation, none.iteration_ms) == ([], [], None)


def test_cycles_file(tmp_path: Path) -> None:
    cycles = [bubble_cycle(seen(record)) for record in synthetic_run()[0]]
    write_cycles(tmp_path / "cycle.json", cycles)
    assert Cycles.model_validate_json((tmp_path / "cycle.json").read_text()).ranks == cycles


def printed(report: Report, width: int = 80) -> str:
    console = Console(width=width, record=True, file=StringIO())
    print_report(report, console)
    print_cycle(report.cycle, console)
    return console.export_text()


def test_a_gpu_is_asked_what_watching_costs() -> None:
    report = report_of(*synthetic_run())
    says = "by watching alone: not measured"
    assert says not in printed(report)
    on_gpu = [rank.model_copy(update={"device": "cuda:0"}) for rank in report.ranks]
    text = printed(report.model_copy(update={"ranks": on_gpu}), 120)
    assert f"{says}; --fill-paired-blocks of 3 or more measures it" in text


def test_terminal_in_80_columns() -> None:
    ranks, workers, jobs = synthetic_run()
    text = printed(report_of(ranks, workers, jobs))
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert "main job slowdown: +1.00% (95% interval +1.00% to +1.00%, 2 pairs of blocks)" in text
    assert "fill efficiency: 0.768" in text
    assert "bubble to first step: p50 100 us, p99 100 us, max 100 us (18 bubbles)" in text
    assert "0.829" in next(line for line in text.splitlines() if line.strip().startswith("all"))
    assert "224 images" in text
    assert "Evaluation bubbles of rank 1 (stage 1)" in text


def test_terminal_without_blocks_or_jobs() -> None:
    ranks = [
        replace(record, iterations=[replace(item, block=-1) for item in record.iterations])
        for record in synthetic_run()[0]
    ]
    text = printed(report_of(ranks, [], []))
    assert "--fill-paired-blocks" in text
    assert "Jobs" not in text
    assert printed(report_of([], [], []))


def test_terminal_tells_what_the_brake_did() -> None:
    ranks = synthetic_run()[0]
    assert "brake" not in printed(report_of(ranks, [], []))
    brakes = [BrakeEvent(10**6 + number, 0.031, 8, 10**6 + 80, 2 * MS) for number in range(7)]
    text = printed(report_of([replace(ranks[0], brakes=brakes[:1]), ranks[1]], [], []))
    assert "automatic brake: stopped filling once on 1 of 2 ranks; on rank 0:" in text
    assert "  after iteration 1000000, +3.1%; again from 1000080" in text
    text = printed(report_of([replace(ranks[0], brakes=brakes[:1]), replace(ranks[1], brakes=brakes)], [], []))
    assert "automatic brake: stopped filling 7 times on 2 of 2 ranks; on rank 1:" in text
    assert "  and 2 times more" in text
    assert text.count("after iteration") == 5
    assert max(map(len, text.splitlines())) <= 80


def test_terminal_with_large_figures_and_markup() -> None:
    record, _ = synthetic_run()[0]
    ranks = [
        RankRecord(
            replace(record.info, rank=rank, stage=rank // 2),
            [replace(item, end_ns=item.start_ns + 200_000 * MS) for item in record.iterations] * 1000,
            [replace(bubble, end_ns=bubble.start_ns + 98_700 * MS) for bubble in record.bubbles],
            [],
        )
        for rank in range(98, 130)
    ]
    reason = "step 3 raised ValueError: [bold]no[/bold] such file " * 4
    jobs = [
        JobRecord(
            "name-" * 8, "m:C", Status(JobState.FAILED, detail=reason), 1234567.25, "token-batches [x]", 3, 1, 0.1
        )
    ]
    text = printed(report_of(ranks, [], jobs))
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert "[bold]no[/bold]" in text


def test_a_job_in_any_state_is_printed() -> None:
    ranks, workers, jobs = synthetic_run()
    for state in JobState:
        text = printed(report_of(ranks, workers, [replace(job, status=Status(state)) for job in jobs]))
        assert text.count(state) == len({job.name for job in jobs})
    colours = [STATE_COLOURS[state] for state in JobState]
    assert len(set(colours)) == len(JobState)


def test_what_a_job_says_does_not_command_the_terminal() -> None:
    ranks, workers, jobs = synthetic_run()
    jobs[0] = replace(jobs[0], status=Status(jobs[0].state, detail="\x1b[2Jgone\x9b"), unit="\x1bx")
    console = Console(width=80, file=(out := StringIO()))
    print_report(report_of(ranks, workers, jobs), console)
    assert not set(out.getvalue()) & {"\x1b", "\x9b"}


def test_results_of_jobs_are_told_in_short() -> None:
    ranks, workers, jobs = synthetic_run()
    result = {"accuracy": 0.98765432, "epochs": 3, "note": "[bold]" + "x" * 100} | {f"v{n}": n for n in range(9)}
    text = printed(report_of(ranks, workers, [replace(jobs[0], result=result), jobs[1]]))
    assert max(map(len, text.splitlines())) <= 80
    text = " ".join(text.split())
    assert "train: accuracy 0.9877, epochs 3, note [bold]xxxx" in text
    assert "v2 2, ..." in text
    assert "resize:" not in text


def test_of_many_jobs_those_that_failed_come_first_and_the_rest_is_counted() -> None:
    ranks, workers, jobs = synthetic_run()
    many = [replace(jobs[1], name=f"job-{number}", directory=str(number)) for number in range(100)]
    many[90] = replace(many[90], status=Status(JobState.FAILED, detail="it broke"))
    text = printed(report_of(ranks, workers, many))
    assert "40 of 100 jobs are shown (1 FAILED, 99 SUCCEEDED); report.json has them all" in text
    assert text.index("job-90 ") < text.index("job-0 ")
    assert text.count("SUCCEEDED") == 39 + 1


def test_the_text_has_whom_the_ranks_waited_for():
    found = [Awaited(rank=1, peer=0, iterations=50, computed_s=3.0, host_s=1.0, transfer_s=0.0)]
    rare = Awaited(rank=0, peer=1, iterations=50, computed_s=0.01, host_s=0.0, transfer_s=0.0)
    text = printed(report_of(*synthetic_run()).model_copy(update={"waits": [*found, rare]}))
    assert "Waits for other stages, latest 50 iterations: 4.01 s" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["1", "0", "4.00", "75%", "25%", "0%"] in rows
    assert not any(row[:3] == ["0", "1", "0.01"] for row in rows)

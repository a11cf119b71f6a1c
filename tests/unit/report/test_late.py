"""The ranks that waited least in their group are those that the others waited for."""

from __future__ import annotations

import io
from collections.abc import Mapping

from rich.console import Console

from megatron.fill.report import Report, print_report
from megatron.fill.report.idle import late_lines
from megatron.fill.report.late import late
from megatron.fill.report.schema import AccountReport, Late, NamedTime, Outside, RankReport
from megatron.fill.types import BubbleKind
from tests.support.synthetic import report_of, synthetic_run

NO_SAVES: Mapping[int, float] = {}


def report() -> Report:
    return report_of(*synthetic_run())


def ranks(waits_s: Mapping[int, float], stages: int = 1, saves_s: Mapping[int, float] = NO_SAVES) -> list[RankReport]:
    """Ranks with 10 s in iterations and these waits for other stages; neighbours are stages of one pipeline."""
    found = []
    for rank, wait_s in waits_s.items():
        save_s = saves_s.get(rank, 0.0)
        changed = {
            "rank": rank,
            "stage": rank % stages,
            "data_parallel_rank": rank // stages,
            "iteration_s": 10.0,
            "bubble_s": {BubbleKind.INTERIOR: wait_s},
            "outside": {BubbleKind.SAVE: Outside(total_s=save_s, fillable_s=0, harvested_s=0)} if save_s else {},
        }
        found.append(report().ranks[0].model_copy(update=changed))
    return found


def account(rank: int | None, name: str, time_s: float) -> AccountReport:
    its = NamedTime(name=name, compute=False, time_s=time_s, share=0.1, long_s=0.0)
    return AccountReport(
        rank=rank, stage=0, wall_s=20.0, named_share=1.0, idle_share=0.1, long_idle_s=0.0, blind=False, times=[its]
    )


def test_stages_that_wait_alike_are_not_late():
    assert late(ranks({0: 3.0, 1: 3.05}, stages=2), []) == []


def test_the_slowest_stage_of_each_pipeline_is_late():
    found = late(ranks({0: 3.0, 1: 1.0, 2: 3.0, 3: 3.0, 4: 2.0, 5: 5.0}, stages=2), [])
    assert found == [
        Late(wait="pipeline", ranks=[4], others=1, late_s=3.0),
        Late(wait="pipeline", ranks=[1], others=1, late_s=2.0),
    ]


def test_the_slowest_stage_of_evaluations_is_late():
    evaluated = [
        one.model_copy(update={"evaluation_bubble_s": {BubbleKind.INTERIOR: wait_s}})
        for one, wait_s in zip(ranks({0: 1.0, 1: 2.0}, stages=2), (5.0, 1.0), strict=True)
    ]
    assert late(evaluated, []) == [Late(wait="pipeline", ranks=[1], others=1, late_s=3.0)]


def test_a_stage_that_waited_for_its_replica_is_not_late_in_its_pipeline():
    """Rank 2 stopped in its data group: rank 0 waited for it there, and the second stages in bubbles."""
    stopped = ranks({0: 0.0, 1: 20.0, 2: 0.0, 3: 20.0}, stages=2)
    accounts = [account(rank, "data group", time_s) for rank, time_s in enumerate((23.0, 1.0, 3.0, 1.0))]
    assert late(stopped, accounts) == [
        Late(wait="data group", ranks=[2], others=1, late_s=20.0),
        Late(wait="pipeline", ranks=[2], others=1, late_s=20.0),
    ]


def test_a_stage_that_waited_in_its_context_group_is_not_late_in_its_pipeline():
    """Rank 3 computed longer: rank 1 waited for it in their context group, and the first stages in bubbles."""
    slow = [
        one.model_copy(update={"data_parallel_rank": 0, "context_parallel_rank": at // 2})
        for at, one in enumerate(ranks({0: 20.0, 1: 0.0, 2: 20.0, 3: 0.0}, stages=2))
    ]
    accounts = [account(rank, "context group", time_s) for rank, time_s in enumerate((1.0, 23.0, 1.0, 3.0))]
    assert late(slow, accounts) == [
        Late(wait="context group", ranks=[3], others=1, late_s=20.0),
        Late(wait="pipeline", ranks=[3], others=1, late_s=20.0),
    ]


def test_a_stage_that_waited_in_its_expert_group_is_not_late_in_its_pipeline():
    """Two expert groups in each of two stages, of ranks 0 and 2, 4 and 6, and so on; rank 3 computed longer."""
    slow = [
        one.model_copy(update={"expert_data_parallel_rank": one.data_parallel_rank // 2})
        for one in ranks({0: 20.0, 1: 0.0, 2: 20.0, 3: 0.0, 4: 9.0, 5: 9.0, 6: 9.0, 7: 9.0}, stages=2)
    ]
    accounts = [account(rank, "expert group", time_s) for rank, time_s in enumerate((1.0, 23.0, 1.0, 3.0, *[7.0] * 4))]
    assert late(slow, accounts) == [
        Late(wait="expert group", ranks=[3], others=1, late_s=20.0),
        Late(wait="pipeline", ranks=[3], others=1, late_s=20.0),
    ]


def test_a_stage_that_waited_between_iterations_for_one_that_waited_for_its_replica_is_not_late():
    """Rank 1 stopped: rank 3 waited in its data group, and rank 2 for rank 3 after the iteration's last bubble."""
    stopped = ranks({0: 20.0, 1: 0.0, 2: 0.0, 3: 0.0}, stages=2)
    waited = (("data group", 0.0), ("data group", 1.0), ("other groups", 20.0), ("data group", 21.0))
    assert late(stopped, [account(rank, *its) for rank, its in enumerate(waited)]) == [
        Late(wait="data group", ranks=[1], others=1, late_s=20.0),
        Late(wait="pipeline", ranks=[1], others=1, late_s=20.0),
    ]


def test_a_rank_without_a_wait_in_saves_was_late_in_them():
    assert late(ranks(dict.fromkeys(range(4), 0.0), saves_s={0: 4.0, 3: 5.0}), []) == [
        Late(wait="save", ranks=[1, 2], others=2, late_s=4.5)
    ]


def test_ranks_are_compared_within_their_group():
    replicas = ranks({0: 1.0, 1: 1.0, 2: 1.0, 3: 3.0}, stages=2)
    accounts = [account(rank, "data group", time_s) for rank, time_s in enumerate((1.0, 4.0, 3.0, 4.0))]
    found = late(replicas, [*accounts, account(None, "data group", 12.0)])
    assert found == [Late(wait="data group", ranks=[0], others=1, late_s=2.0)]


def test_tensor_and_pipeline_groups_are_of_one_place_in_context_parallelism():
    """Two tensor groups of one stage; rank 2 is late in its own, and ranks 0 and 1 wait for it elsewhere."""
    four = [
        one.model_copy(
            update={"data_parallel_rank": 0, "tensor_parallel_rank": at % 2, "context_parallel_rank": at // 2}
        )
        for at, one in enumerate(ranks({0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0}))
    ]
    accounts = [account(rank, "tensor group", time_s) for rank, time_s in enumerate((0.2, 0.2, 0.1, 3.1))]
    assert late(four, accounts) == [Late(wait="tensor group", ranks=[2], others=1, late_s=3.0)]
    stages = [
        one.model_copy(update={"stage": at // 2, "context_parallel_rank": at % 2, "tensor_parallel_rank": 0})
        for at, one in enumerate(four)
    ]
    waited = [
        one.model_copy(update={"bubble_s": {BubbleKind.FILL: wait_s}})
        for one, wait_s in zip(stages, (1.0, 3.0, 1.0, 5.0), strict=True)
    ]
    assert late(waited, []) == [Late(wait="pipeline", ranks=[1], others=1, late_s=2.0)]


def test_the_text_names_the_five_longest():
    console = Console(file=io.StringIO(), width=200)
    many = [Late(wait="all ranks", ranks=list(range(9)), others=3, late_s=2.0)] * 6
    one = Late(wait="save", ranks=[1], others=1, late_s=4.56)
    least = Late(wait="all ranks", ranks=[3], others=3, late_s=0.04)
    print_report(report().model_copy(update={"late": [one, *many, least]}), console)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert "late in save: rank 1; the other rank waited 4.6 s more" in lines
    said = "late in all ranks: ranks 0, 1, 2, 3 and 5 more; the 3 others each waited 2.0 s more"
    assert lines.count(said) == 4
    assert "  and 2 more; report.json has them all" in lines


def test_lateness_that_rounds_to_nothing_is_not_printed():
    late_by = [Late(wait="all ranks", ranks=[3], others=3, late_s=late_s) for late_s in (0.06, 0.04)]
    assert list(late_lines(late_by)) == ["late in all ranks: rank 3; the 3 others each waited 0.1 s more"]

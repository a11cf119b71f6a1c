"""Megatron's own timers stand beside the account's rows for the same time."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from megatron.fill.account import Account
from megatron.fill.records.account import AccountWriter, read_accounts
from megatron.fill.records.segment import begin_segment
from megatron.fill.report.account import account, account_records, compared, timers
from megatron.fill.report.idle import print_timers
from megatron.fill.types import RankInfo


def test_a_timer_is_compared_with_what_the_account_has_for_its_time():
    seen = {"forward": 10.0, "backward": 20.0, "interior": 4.0, "fill": 1.0, "data group": 2.0}
    ours = {"forward-compute": 9.5, "forward-recv": 3.0, "backward-send-forward-recv": 1.5, "interval-time": 50.0}
    forward, waits, rest = compared(ours, seen)
    assert (forward.rows, forward.account_s, forward.difference_s) == (["forward"], 10.0, 0.5)
    assert waits.timers == ["forward-recv", "backward-send-forward-recv"]
    assert (waits.rows, waits.time_s, waits.difference_s) == (["fill", "interior"], 4.5, 0.5)
    assert (rest.timers, rest.rows, rest.account_s, rest.difference_s) == (["interval-time"], [], None, None)


def test_passes_are_compared_together_where_the_account_does_not_say_in_which_their_collectives_were():
    seen = {"forward": 1.0, "backward": 2.0, "fill": 0.5, "tensor group": 6.0, "expert group": 0.25, "data group": 9.0}
    ours = {"forward-backward": 10.0, "forward-compute": 4.0, "backward-compute": 5.0}
    both, passes = compared(ours, seen)
    groups = ["tensor group", "expert group"]
    assert (both.rows, both.account_s) == (["forward", "backward", *groups, "fill"], 9.75)
    assert (passes.timers, passes.rows) == (["forward-compute", "backward-compute"], ["forward", "backward", *groups])
    assert (passes.time_s, passes.account_s, passes.difference_s) == (9.0, 9.25, 0.25)


def test_what_replicas_exchange_is_the_gradients_and_the_parameters_and_not_the_experts_tokens():
    ours = {"params-all-gather": 1.0, "all-grads-sync": 2.0}
    (found,) = compared(ours, {"data group": 3.5, "expert group": 9.0})
    assert (found.timers, found.rows, found.difference_s) == (
        ["all-grads-sync", "params-all-gather"],
        ["data group"],
        0.5,
    )


def test_timers_are_added_up_over_ranks_and_segments_and_printed(tmp_path: Path):
    segments = [begin_segment(tmp_path, "train", 2).segment for _ in range(2)]
    for segment in segments:
        for rank in range(2):
            written(segment.folder, rank)
    records = account_records(segments)
    found = timers(records, account(segments, records))
    assert [(one.timers, one.time_s, one.account_s) for one in found] == [
        (["backward-compute"], pytest.approx(3.2), pytest.approx(4.0)),
        (["interval-time"], pytest.approx(12.0), None),
    ]
    print_timers(found, Console(file=(out := StringIO()), width=80))
    assert "backward-compute" in out.getvalue()
    assert "+25.0%" in out.getvalue()
    assert "interval-time" not in out.getvalue()
    assert max(map(len, out.getvalue().splitlines())) <= 80


def written(folder: Path, rank: int) -> None:
    now_ns = 0
    its = Account(lambda: now_ns)
    with its.within("backward"):
        now_ns += 1_000_000_000
    its.timers = lambda: {"backward-compute": 0.8, "interval-time": 3.0}
    AccountWriter(folder, RankInfo(rank, 2, rank, 2, 0, 1, rank, 2), its, lambda: True).close()


def test_without_timers_nothing_is_said_and_an_account_outlives_broken_ones(tmp_path: Path):
    def broken() -> dict[str, float]:
        raise AttributeError("no such timers")

    its = Account()
    its.timers = broken
    segment = begin_segment(tmp_path, "train", 1).segment
    AccountWriter(segment.folder, RankInfo(0, 1, 0, 1, 0, 1, 0, 1), its, lambda: True).close()
    assert [one.timers for one in read_accounts(segment.folder)] == [{}]
    records = account_records([segment])
    print_timers(timers(records, account([segment], records)), Console(file=(out := StringIO())))
    assert out.getvalue() == ""

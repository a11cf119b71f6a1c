"""Accounts are written, read back, added up over ranks and segments, and printed."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from megatron.fill.account import Account
from megatron.fill.errors import FillError
from megatron.fill.linux.proc import waited_ns_in
from megatron.fill.records.account import AccountWriter, read_accounts
from megatron.fill.records.segment import begin_segment
from megatron.fill.report.account import account, account_records
from megatron.fill.report.idle import print_account
from megatron.fill.report.schema import AccountReport, NamedTime
from megatron.fill.types import RankInfo
from tests.support.waiting import until


def written(folder: Path, rank: int, *, waits: bool, idle_ns: int = 2_000_000) -> None:
    now_ns = 0
    its = Account(lambda: now_ns)
    its.settle()
    for name, length_ns in (
        ("forward", 6_000_000),
        ("optimizer", 1_000_000),
        ("fill", idle_ns),
        ("unnamed", 1_000_000),
    ):
        with its.within(name):
            now_ns += length_ns
    info = RankInfo(rank, 2, rank, 2, 0, 1, rank, 2)
    AccountWriter(folder, info, its, lambda: waits).close()


def test_compute_and_named_idle_time_are_shares_of_the_wall_time(tmp_path: Path):
    segment = begin_segment(tmp_path, "train", 2).segment
    written(segment.folder, 0, waits=True)
    written(segment.folder, 1, waits=True, idle_ns=500_000)
    first, _, whole = account([segment], account_records([segment]))
    assert (first.rank, first.stage, first.wall_s) == (0, 0, 0.01)
    assert (first.named_share, first.idle_share, first.long_idle_s) == pytest.approx((0.9, 0.2, 0.002))
    assert [one.name for one in first.times if one.compute] == ["forward", "optimizer"]
    assert (whole.rank, whole.wall_s, whole.long_idle_s) == (None, pytest.approx(0.0185), 0.002)
    assert sum(one.share for one in whole.times) == pytest.approx(1)


def test_a_host_without_a_core_is_named(tmp_path: Path):
    segment = begin_segment(tmp_path, "train", 2).segment
    for rank, late_ms in enumerate((0, 300)):
        its, waited_ns = Account(), [5]
        writer = AccountWriter(segment.folder, RankInfo(rank, 2, rank, 2, 0, 1, rank, 2), its, lambda: True)
        kernels = waited_ns_in(Path(f"/proc/self/task/{threading.get_native_id()}/schedstat"))
        assert kernels <= its.without_core()
        assert its.without_core() > 0 or not kernels
        its.without_core = partial(lambda waited: waited[0], waited_ns)
        its.settle()
        waited_ns[0] += late_ms * 1_000_000
        writer.close()
    accounts = account([segment], account_records([segment]))
    assert [one.host_late_s for one in accounts] == pytest.approx([0, 0.3, 0.3])
    print_account(accounts, Console(file=(out := StringIO()), width=80), "train")
    assert "ready, but without a core, as others had it: rank 1, for up to 0.3 s" in out.getvalue()


def test_a_training_that_is_killed_at_once_has_an_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("megatron.fill.records.account._WRITE_S", 3600.0)  # as if killed before the second write
    writer = AccountWriter(tmp_path, RankInfo(0, 1, 0, 1, 0, 0, 0, 1), Account(), lambda: False)
    until(lambda: read_accounts(tmp_path))
    assert list(read_accounts(tmp_path)[0].spent) == ["start-up"]
    writer.close()


def test_the_time_between_segments_is_idle(tmp_path: Path):
    first, second = (begin_segment(tmp_path, "train", 2).segment for _ in range(2))
    for segment in (first, second):
        written(segment.folder, 0, waits=True)
    gap = [replace(first, started_s=0.0, ended_s=1.0), replace(second, started_s=3.0)]
    whole = account(gap, account_records(gap))[-1]
    assert whole.times[0].name == "between starts"
    assert (whole.times[0].time_s, whole.wall_s) == (2.0, pytest.approx(2.02))


def test_a_training_of_several_stages_without_a_wait_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    segment = begin_segment(tmp_path, "train", 2).segment
    with caplog.at_level(logging.ERROR, "pipefill"):
        written(segment.folder, 0, waits=True)
        assert not caplog.records
        written(segment.folder, 1, waits=False)
    assert "NO WAIT FOR ANOTHER STAGE WAS SEEN" in caplog.text
    out = StringIO()
    accounts = account([segment], account_records([segment]))
    print_account(accounts, Console(file=out, width=80), "train")
    assert [one.blind for one in accounts] == [False, True, False]
    assert "on 1 of 2 ranks: NO WAIT" in out.getvalue()
    assert max(map(len, out.getvalue().splitlines())) <= 80


@pytest.mark.parametrize(
    ("command", "names", "drain", "data"),
    [
        ("train", ("drain",), "--fill-jobs", None),  # without replicas there is nothing to reduce
        ("train", ("drain", "data group"), "--fill-jobs; --overlap-grad-reduce", "--overlap-grad-reduce; "),
        ("train --fill-store s --overlap-grad-reduce", ("drain", "data group"), "", "--overlap-param-gather"),
        ("train --num-workers 0", ("drain", "data loading"), "--fill-jobs", "more --num-workers"),
    ],
)
def test_only_what_a_training_does_not_have_yet_helps(
    command: str, names: tuple[str, ...], drain: str, data: str | None
) -> None:
    helps = helping(command, *names)
    assert helps["drain"] == drain
    assert data is None or helps[names[1]].startswith(data)


EXPERTS = "--expert-model-parallel-size 2 --bf16"


@pytest.mark.parametrize(
    ("flags", "name", "helps"),
    [
        ("--overlap-grad-reduce", "data group", "--overlap-param-gather with --use-distributed-optimizer"),
        ("--overlap-grad-reduce --use-distributed-optimizer", "data group", "--overlap-param-gather"),
        ("", "save", "--async-save with --use-persistent-ckpt-worker and --async-strategy mcore; MORE"),
        ("--async-save --async-strategy mcore", "save", "--async-save with --use-persistent-ckpt-worker; MORE"),
        ("--async-save --use-persistent-ckpt-worker", "save", "MORE"),
        ("--ckpt-format torch", "save", "MORE"),
        (
            "--async-save --ckpt-format=torch_dist",
            "save",
            "--async-save with --use-persistent-ckpt-worker and MCORE; MORE",
        ),
        ("", "tensor group", "--tp-comm-overlap with --sequence-parallel and Transformer Engine"),
        ("--sequence-parallel --transformer-impl local", "tensor group", ""),
        (EXPERTS, "expert group", "OVERLAP with --moe-token-dispatcher-type alltoall"),
        (f"{EXPERTS} --moe-token-dispatcher-type flex", "expert group", "OVERLAP"),
        (f"{EXPERTS} --recompute-method uniform", "expert group", ""),
        (f"{EXPERTS} --pipeline-model-parallel-size 2", "expert group", ""),
        ("--expert-model-parallel-size 2", "expert group", ""),
        ("--bf16", "expert group", ""),
    ],
)
def test_what_a_flag_needs_is_named_with_it_and_none_that_megatron_refuses(flags: str, name: str, helps: str) -> None:
    short = {"MORE": "a higher --save-interval", "MCORE": "--async-strategy mcore"}
    short["OVERLAP"] = "--overlap-moe-expert-parallel-comm"
    for word, text in short.items():
        helps = helps.replace(word, text)
    assert helping(f"train {flags}", name)[name] == helps


def helping(command: str, *names: str) -> dict[str, str]:
    """What is said to help in such a training, by the name of its idle time."""
    times = [NamedTime(name=name, compute=False, time_s=1.0, share=0.5, long_s=1.0) for name in names]
    whole = AccountReport(
        rank=None, stage=None, wall_s=2.0, named_share=1.0, idle_share=1.0, long_idle_s=2.0, blind=False, times=times
    )
    print_account([whole, whole], Console(file=(out := StringIO()), width=200), command)
    return {line.split("  ")[0]: line.split("%")[-1].strip() for line in out.getvalue().splitlines() if "%  " in line}


def test_a_segment_without_accounts_has_none_and_a_damaged_one_is_an_error(tmp_path: Path):
    segment = begin_segment(tmp_path, "train", 1).segment
    assert account([segment], account_records([segment])) == []
    print_account([], Console(file=(out := StringIO())), "train")
    assert out.getvalue() == "Where the time of the ranks went is not known: no rank has written an account\n\n"
    (segment.folder / "account0.json").write_text('{"version": 5, "kind": "account", "spent": 3}\n')
    with pytest.raises(FillError, match="damaged"):
        read_accounts(segment.folder)

"""A run folder is for one training at a time."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.fill.app import runlock
from megatron.fill.app.runlock import join, lock_run_folder, take
from megatron.fill.attached import Attached
from megatron.fill.errors import RunTaken
from megatron.fill.folders import RUN_LOCK
from megatron.fill.types import RankInfo
from tests.support.children import Child

NODE = os.uname().nodename


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runlock, "_DYING_S", 0.1)
    monkeypatch.setattr(runlock, "_LOOK_S", 0.01)


def test_a_second_training_is_told_who_holds_the_folder_and_what_to_do(tmp_path, holder):
    run = tmp_path / "run"
    first = holder(lambda: take(run, 2))
    before = (run / RUN_LOCK).read_bytes()
    with pytest.raises(RunTaken) as refused:
        take(run, 2)
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime())[:-3]
    text = str(refused.value)
    assert text.startswith(
        f"the run folder {run} is in use by another training (its rank 0, process {first.pid} on {NODE}, since {since}"
    )
    assert text.endswith("; expected another --fill-report, or that that training has ended")
    assert (run / RUN_LOCK).read_bytes() == before  # nothing is written


def test_a_killed_training_is_in_nobodys_way(tmp_path, holder):
    first = holder(lambda: take(tmp_path, 2))
    first.kill()
    os.close(take(tmp_path, 2))
    assert json.loads((tmp_path / RUN_LOCK).read_text())["pid"] == os.getpid()


def test_a_rank_that_outlives_rank_0_still_holds_the_folder(tmp_path, holder):
    rank_0 = holder(lambda: take(tmp_path, 4))
    rank_3 = holder(lambda: join(tmp_path, 3))
    rank_0.kill()
    with pytest.raises(RunTaken, match=rf"its rank 3, process {rank_3.pid} on {NODE}"):
        take(tmp_path, 2)


def test_ranks_of_one_training_hold_it_together_and_of_two_do_not(tmp_path, holder):
    holder(lambda: take(tmp_path, 3))
    holder(lambda: join(tmp_path, 1))
    os.close(join(tmp_path, 2))
    with pytest.raises(RunTaken, match="its rank 1"):
        join(tmp_path, 1)


def test_a_process_forked_from_a_rank_does_not_keep_its_lock(tmp_path, holder):
    def forks() -> None:
        take(tmp_path, 1)
        if os.fork() == 0:
            time.sleep(3)
            os._exit(0)

    holder(forks).kill()
    os.close(take(tmp_path, 1))


def test_a_lost_nodes_lock_is_waited_for_and_can_be_overridden(tmp_path, holder, monkeypatch, caplog):
    monkeypatch.setattr(runlock, "network_file_system", lambda path: "nfs4")
    holder(lambda: take(tmp_path, 2))
    note = json.loads((tmp_path / RUN_LOCK).read_text())
    (tmp_path / RUN_LOCK).write_text(json.dumps(note | {"host": "node7"}))
    began_s = time.monotonic()
    with pytest.raises(RunTaken, match=rf"on node7, since .*; if node7 is lost, remove {tmp_path / RUN_LOCK}"):
        take(tmp_path, 2, most_s=0.5)
    assert time.monotonic() - began_s > 0.5
    assert "waiting for 0 s, in case its node is lost" in caplog.text
    (tmp_path / RUN_LOCK).unlink()
    os.close(take(tmp_path, 2))


def test_a_file_system_without_locks_is_said_and_used(tmp_path, monkeypatch, caplog):
    def none(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", none)
    os.close(take(tmp_path, 1))
    assert "cannot be locked (No locks available): a second training would not be noticed" in caplog.text


def test_a_note_that_says_nothing_still_refuses(tmp_path, holder):
    holder(lambda: take(tmp_path, 2))
    for text in ("", "[]", '{"host": 1, "pid": [], "since_s": "x"}'):
        (tmp_path / RUN_LOCK).write_text(text)
        with pytest.raises(RunTaken, match="is in use by another training"):
            take(tmp_path, 2)


def test_a_folder_that_cannot_be_made_is_no_reason_not_to_train(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    info = RankInfo(0, 1, 0, 1, 0, 1, 0, 1)
    assert lock_run_folder(str(tmp_path / "file" / "run"), info) is None
    assert "cannot be used, so nothing is filled" in caplog.text


def test_a_refusal_reaches_the_training_and_other_failures_do_not():
    def refusing(error: Exception) -> Attached:
        def on_start(info: RankInfo, args: object) -> None:
            raise error

        return Attached(on_start=on_start)

    info = RankInfo(0, 1, 0, 1, 0, 1, 0, 1)
    with pytest.raises(RunTaken):
        refusing(RunTaken("x")).started(info, None)  # type: ignore[arg-type]
    refusing(ValueError("x")).started(info, None)  # type: ignore[arg-type]


def ranks(tmp_path: Path, body: Callable[[RankInfo], str]) -> list[str]:
    """What two ranks over gloo say, each in a process of its own."""
    import torch.distributed as dist  # before the fork, once

    place = tmp_path / f"meet-{len(list(tmp_path.iterdir()))}"

    def rank(number: int) -> Callable[[int], None]:
        def run(out: int) -> None:
            dist.init_process_group("gloo", init_method=f"file://{place}", rank=number, world_size=2)
            os.write(out, body(RankInfo(number, 2, number, 2, 0, 1, number, 2)).encode())
            dist.barrier()

        return run

    children = [Child(rank(number)) for number in (0, 1)]
    try:
        return [one.read().decode() for one in children]
    finally:
        for one in children:
            one.end()


def said(run: str, info: RankInfo) -> str:
    try:
        held = lock_run_folder(run, info)
    except RunTaken as error:
        return f"refused: {error}"
    return "" if held is None else f"held {held[0].name}"


def test_every_rank_ends_alike(tmp_path, holder):
    run = tmp_path / "run"
    assert ranks(tmp_path, lambda info: said(str(run) if info.rank == 0 else "", info)) == ["held run", "held run"]
    holder(lambda: join(run, 1))  # and of rank 0's own folder nobody has anything
    first, second = ranks(tmp_path, lambda info: said(str(run), info))
    assert first == second
    assert "its rank 1" in first


def test_every_rank_is_refused_where_one_finds_another_training(tmp_path, holder, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    holder(lambda: join(there, 1))

    def one(info: RankInfo) -> str:
        monkeypatch.setattr(runlock, "join", lambda run, rank: join(there, rank))
        return said(str(here), info)

    first, second = ranks(tmp_path, one)
    assert first == second
    assert first.startswith(f"refused: the run folder {there} is in use by another training (its rank 1")

"""Agents agree when the jobs of all ranks have settled."""

from __future__ import annotations

import shutil

from megatron.fill.agent.settling import FOLDER, IDLE_LOOKS, Settling
from megatron.fill.pages.control import ControlPage


class Rank:
    def __init__(self, records, rank: int, ranks: int) -> None:
        self.page = ControlPage.create(rank)
        self.stepped: bool | None = False
        self.settling = Settling(records, rank, ranks, lambda: self.stepped, self.page)


def test_a_rank_is_told_when_the_jobs_of_all_have_stepped(tmp_path):
    first, second = Rank(tmp_path, 0, 2), Rank(tmp_path, 1, 2)
    first.stepped = True
    assert not first.settling.look()
    assert not second.settling.look()
    second.stepped = True
    assert second.settling.look()
    assert not first.page.settled  # each is told by its own agent
    assert first.settling.look()
    assert first.page.settled
    assert second.page.settled


def test_a_rank_without_jobs_holds_nobody_up_for_long(tmp_path):
    rank = Rank(tmp_path, 0, 1)
    rank.stepped = None
    looks = [rank.settling.look() for _ in range(IDLE_LOOKS)]
    assert looks == [False] * (IDLE_LOOKS - 1) + [True]


def test_a_job_that_comes_meanwhile_is_waited_for(tmp_path):
    rank = Rank(tmp_path, 0, 1)
    for rank.stepped in [None] * (IDLE_LOOKS - 1) + [False] + [None] * (IDLE_LOOKS - 1):
        assert not rank.settling.look()


def test_an_agent_that_follows_a_dead_one_counts_its_rank_once(tmp_path):
    for _ in range(2):
        rank = Rank(tmp_path, 0, 2)
        rank.stepped = True
        assert not rank.settling.look()
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == ["0"]


def test_a_rank_that_has_said_so_says_it_again_where_the_folder_was_deleted(tmp_path):
    records = tmp_path / "records" / "1"
    records.mkdir(parents=True)
    first, second = Rank(records, 0, 2), Rank(records, 1, 2)
    first.stepped = second.stepped = True
    assert not first.settling.look()
    shutil.rmtree(tmp_path / "records")
    assert not first.settling.look()
    assert second.settling.look()
    assert first.settling.look()


def test_workers_see_it_too():
    page = ControlPage.create(0)
    assert not page.settled
    page.settle()
    assert page.settled
    assert page.running

"""The control page: its ends, how it is found, and the operator's commands."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from megatron.fill.cli import main
from megatron.fill.cli.control import change
from megatron.fill.errors import ControlError
from megatron.fill.pages.control import _AGENT_BORN, ControlPage, ControlReader, Figures, RunState
from megatron.fill.pages.find import damaged_notes, find_pages
from megatron.fill.pages.watcher import watch_control
from tests.support.waiting import until

NODE = os.uname().nodename
pytestmark = pytest.mark.usefixtures("own_pages")


def an_agent(page: ControlPage, acts: bool = True) -> Callable[[int], None]:
    def body(out: int) -> None:
        page.acknowledge(page.word)
        if acts:
            watch_control(page, lambda state: None)
        os.write(out, b"ready")
        time.sleep(1000)

    return body


class TestPage:
    @given(st.lists(st.sampled_from(RunState)))
    def test_every_end_sees_the_last_change(self, states):
        page = ControlPage.create(3)
        reader = ControlReader(page.reader_fd())
        words = {page.word}
        for state in states:
            page.change(state)
            words.add(page.word)
            assert reader.state is state is page.state
            assert reader.running == (state in (RunState.RUNNING, RunState.DRAINING))
            assert not page.acknowledged
        assert len(words) == len(states) + 1  # a change to the same state is one, too
        os.close(page.fd)

    def test_it_begins_running_and_knows_its_rank(self):
        page = ControlPage.create(3)
        assert (page.rank, page.pid, page.agent, page.state) == (3, os.getpid(), 0, RunState.RUNNING)
        assert page.running
        assert not page.agent_lives

    def test_a_reader_cannot_write_and_nobody_can_shorten_it(self):
        page = ControlPage.create(0)
        fd = page.reader_fd()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(fd, b"x")
        with pytest.raises(PermissionError):
            os.ftruncate(page.fd, 0)
        assert os.fstat(fd).st_mode & 0o777 == 0o600

    def test_another_file_is_refused(self, tmp_path):
        path = tmp_path / "other"
        path.write_bytes(bytes(4096))
        with pytest.raises(ControlError, match="is not a control page"):
            ControlReader(os.open(path, os.O_RDONLY))
        path.write_bytes(b"")
        with pytest.raises(ControlError, match="cannot be mapped"):
            ControlReader(os.open(path, os.O_RDONLY))

    def test_the_watcher_hears_every_lasting_change_and_acknowledges_it(self):
        page = ControlPage.create(0)
        heard: list[RunState] = []
        watch_control(page, heard.append)
        until(lambda: page.acknowledged)
        for state in (RunState.PAUSED, RunState.KILLED, RunState.RUNNING, RunState.RUNNING):
            page.change(state)
            until(lambda: page.acknowledged)
        assert heard == [0, 1, 3, 0, 0]
        assert page.agent == os.getpid()

    def test_a_callback_that_fails_is_not_acknowledged_and_called_again(self):
        page = ControlPage.create(0)
        heard: list[RunState] = []

        def act(state: RunState) -> None:
            heard.append(state)
            if state is RunState.KILLED:
                raise ProcessLookupError

        watch_control(page, act)
        until(lambda: page.acknowledged)
        page.change(RunState.KILLED)
        until(lambda: len(heard) == 2)
        assert not page.acknowledged
        page.change(RunState.RUNNING)
        until(lambda: page.acknowledged)

    def test_signals_are_left_to_the_main_thread(self):
        page = ControlPage.create(0)
        watch_control(page, lambda state: None)
        until(lambda: page.acknowledged)
        thread = next(one for one in threading.enumerate() if one.name == "control")
        status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
        blocked = int(next(line for line in status.splitlines() if line.startswith("SigBlk")).split()[1], 16)
        assert blocked >> (signal.SIGCHLD - 1) & 1
        assert blocked >> (signal.SIGTERM - 1) & 1


class TestFinding:
    def test_the_live_ranks_of_this_node_by_rank(self, tmp_path):
        for rank in (10, 9):
            ControlPage.create(rank).announce(tmp_path)
        assert [page.rank for page in find_pages(tmp_path)] == [9, 10]
        find_pages(tmp_path)[1].change(RunState.PAUSED)
        assert [page.state for page in find_pages(tmp_path)] == [RunState.RUNNING, RunState.PAUSED]

    def test_what_was_found_before_is_not_opened_again(self, tmp_path):
        ControlPage.create(1).announce(tmp_path)
        first = find_pages(tmp_path)
        ControlPage.create(2).announce(tmp_path)
        second = find_pages(tmp_path, first)
        assert second[0] is first[0]
        assert [page.rank for page in second] == [1, 2]
        ControlPage.create(1).announce(tmp_path)  # the rank has started again
        third = find_pages(tmp_path, second)
        assert third[0] is not first[0]
        assert third[1] is second[1]

    def test_no_such_run(self, tmp_path):
        with pytest.raises(ControlError, match="no such folder"):
            find_pages(tmp_path / "none")

    def test_nothing_here_names_the_other_nodes(self, tmp_path):
        for node in ("node-b", "node-a"):
            (tmp_path / "control" / node).mkdir(parents=True)
        with pytest.raises(ControlError, match=f"runs on this node, {NODE}; it has ranks on node-a, node-b, and"):
            find_pages(tmp_path)

    def test_what_a_dead_rank_left_is_passed_over(self, tmp_path, child):
        dead = child(lambda out: os.write(out, ControlPage.create(0).announce(tmp_path).name.encode()))
        assert dead.read() == b"rank0.json"
        with pytest.raises(ControlError, match="none of its ranks"):
            find_pages(tmp_path)
        ControlPage.create(1).announce(tmp_path)
        assert [page.rank for page in find_pages(tmp_path)] == [1]

    @pytest.mark.parametrize("text", ["", "{}", "[]", '{"pid": "x", "fd": 0}', '{"pid": 1, "fd": -1}', "\0"])
    def test_a_damaged_note_is_passed_over(self, tmp_path, text):
        path = ControlPage.create(1).announce(tmp_path)
        path.with_name("rank0.json").write_text(text)
        assert [page.rank for page in find_pages(tmp_path)] == [1]

    @pytest.mark.parametrize("kind", ["emptied", "pipe", "link", "deep", "1e400"])
    def test_a_damaged_note_is_no_claim_that_its_rank_is_gone(self, tmp_path, kind):
        page = ControlPage.create(1)
        path = page.announce(tmp_path)
        assert damaged_notes(tmp_path) == []
        path.unlink()
        if kind == "pipe":
            os.mkfifo(path)  # to open it would block for ever
        elif kind == "link":
            path.symlink_to("/dev/zero")
        else:
            path.write_text({"emptied": "", "deep": "[" * 100_000, "1e400": '{"pid": 1e400, "fd": 1}'}[kind])
        [line] = damaged_notes(tmp_path)
        assert f"{path} is damaged" in line
        assert "whether that rank runs, and in which state, is not known" in line
        with pytest.raises(ControlError, match=r"rank1.json is damaged"):
            find_pages(tmp_path)

    def test_a_descriptor_that_is_something_else_by_now_is_not_opened(self, tmp_path):
        fifo = tmp_path / "fifo"
        os.mkfifo(fifo)
        fd = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        path = ControlPage.create(1).announce(tmp_path)
        path.write_text(json.dumps({"pid": os.getpid(), "fd": fd}))
        with pytest.raises(ControlError, match="none of its ranks"):
            find_pages(tmp_path)

    def test_another_rank_s_page_is_not_taken_for_it(self, tmp_path):
        path = ControlPage.create(1).announce(tmp_path)
        path.rename(path.with_name("rank2.json"))
        with pytest.raises(ControlError, match="none of its ranks"):
            find_pages(tmp_path)


class TestCommands:
    def run(self, monkeypatch, capsys, *arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pipefill", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit:
            main()
        captured = capsys.readouterr()
        return int(exit.value.code or 0), captured.out, captured.err

    def test_each_says_what_it_did_per_rank(self, tmp_path, monkeypatch, capsys, child):
        pages = [ControlPage.create(rank) for rank in (0, 1)]
        for page in pages:
            page.announce(tmp_path)
            os.read(child(an_agent(page)).out, 5)
        for command, state in [("pause", "PAUSED"), ("resume", "RUNNING"), ("drain", "DRAINING"), ("kill", "KILLED")]:
            code, out, _ = self.run(monkeypatch, capsys, command, tmp_path)
            assert code == 0
            rows = [line.split() for line in out.splitlines()]
            assert rows[0] == ["RANK", "PID", "AGENT", "STATE", "ACKNOWLEDGED"]
            assert [row[:1] + row[3:] for row in rows[1:]] == [["0", state, "yes"], ["1", state, "yes"]]
            assert [page.state.name for page in pages] == [state] * 2
        code, out, _ = self.run(monkeypatch, capsys, "status", tmp_path, "--json")
        assert code == 0
        assert json.loads(out) == {
            "node": NODE,
            "still": [],
            "ranks": [
                {"rank": p.rank, "pid": os.getpid(), "agent": p.agent, "state": "KILLED", "acknowledged": True}
                for p in pages
            ],
        }

    def test_an_agent_that_does_not_answer_makes_it_fail(self, tmp_path, capsys, child):
        page = ControlPage.create(0)
        page.announce(tmp_path)
        os.read(child(an_agent(page, acts=False)).out, 5)
        with pytest.raises(typer.Exit) as ended:
            change(tmp_path, RunState.PAUSED, as_json=False, wait_s=0.05)
        assert ended.value.exit_code == 1
        assert capsys.readouterr().out.split()[-1] == "no"
        assert page.state is RunState.PAUSED

    def test_a_rank_that_nobody_can_tell_makes_it_fail_and_the_others_are_told(
        self, tmp_path, monkeypatch, capsys, child
    ):
        page = ControlPage.create(0)
        path = page.announce(tmp_path)
        os.read(child(an_agent(page)).out, 5)
        os.mkfifo(path.with_name("rank1.json"))
        for command in ("pause", "status"):
            code, out, err = self.run(monkeypatch, capsys, command, tmp_path)
            assert code == 1
            assert out.splitlines()[1].split()[3:] == ["PAUSED", "yes"]
            assert "rank1.json is damaged" in err

    def test_an_agent_that_has_not_started_yet_is_not_gone(self, tmp_path, monkeypatch, capsys):
        ControlPage.create(0).announce(tmp_path)
        _, out, _ = self.run(monkeypatch, capsys, "status", tmp_path)
        assert out.split()[-3:] == ["starting", "RUNNING", "yes"]

    def test_an_agent_that_is_gone_is_not_waited_for(self, tmp_path, monkeypatch, capsys, child):
        page = ControlPage.create(0)
        page.announce(tmp_path)
        agent = child(lambda out: page.acknowledge(page.word))
        agent.read()
        until(lambda: not page.agent_lives)
        code, out, _ = self.run(monkeypatch, capsys, "pause", tmp_path)
        assert code == 0
        assert out.split()[-3:] == ["gone", "PAUSED", "-"]

    def test_an_agent_that_took_the_place_of_a_dead_one_is_the_agent(self, child):
        page = ControlPage.create(0)
        first = child(an_agent(page))
        os.read(first.out, 5)
        os.kill(first.pid, signal.SIGKILL)
        until(lambda: not page.agent_lives)
        page.change(RunState.KILLED)
        second = child(an_agent(page))
        os.read(second.out, 5)
        assert page.agent_lives
        assert (page.agent, page.acknowledged, page.state) == (second.pid, True, RunState.KILLED)
        page._words[_AGENT_BORN] -= 1  # as if another process had the number
        assert not page.agent_lives

    def test_a_wrong_folder_is_one_line(self, tmp_path, monkeypatch, capsys):
        code, out, err = self.run(monkeypatch, capsys, "pause", tmp_path)
        assert (code, out) == (2, "")
        assert err == f"pipefill: error: {tmp_path}: none of its ranks runs on this node, {NODE}\n"


def test_the_agent_shows_the_rank_its_figures_once_it_has_asked(tmp_path):
    rank = ControlPage.create(3)
    agent = ControlPage(rank.fd)
    assert not agent.asked
    assert rank.ask() == {}
    assert agent.asked
    agent.show(Figures(0.25, 0.5, math.nan, math.nan, math.nan, 2.0))
    assert rank.ask() == {"bubble_share": 0.25, "harvest_ratio": 0.5, "jobs_done": 2.0}

"""``pipefill top``, in a terminal of 80 columns, with its keys."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from megatron.fill.cli.top import _View
from megatron.fill.folders import BETWEEN
from megatron.fill.pages.control import ControlPage, RunState
from megatron.fill.pages.find import notes
from megatron.fill.records.agent import AgentFile, write_agent
from megatron.fill.records.rank import rank_file
from megatron.fill.records.segment import begin_segment, read_segments
from megatron.fill.status import JobState, Status
from megatron.fill.store import open_store
from megatron.fill.types import BubbleKind
from megatron.fill.work import NewJob, Work
from tests.support.segments import write_rank, write_segment
from tests.support.synthetic import report_of, synthetic_run
from tests.support.waiting import until

PIPEFILL = [sys.executable, "-c", "from megatron.fill.cli import main; main()", "top"]


@pytest.fixture
def run(tmp_path) -> Path:
    """The synthetic run while it goes on: its jobs run, and another one waits."""
    folder = tmp_path / "run"
    folder.mkdir()
    store = open_store(folder)
    store.submit([NewJob("waiting", Work("m:C"))])
    store.close()
    begin_segment(folder, "train", 2, store=f"sqlite:///{folder}/jobs.db")
    records = read_segments(folder)[-1].folder
    ranks, workers, jobs = synthetic_run()
    named = {job.name: job for job in jobs}
    for record in ranks:
        write_rank(rank_file(records, record.info.rank), record)
        its = [(named[one.job], one) for one in workers if one.rank == record.info.rank]
        write_agent(records / f"agent{record.info.rank}.running.jsonl", its)
    return folder


def test_one_view_fits_80_columns(run):
    done = subprocess.run([*PIPEFILL, str(run), "--once"], capture_output=True, text=True, check=True, env=ENVIRON)
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(done.stdout.split())
    assert "jobs: 1 queued, 0 running" in text
    assert "resize, graph" in text
    assert "none of its ranks runs on this node" in text


ENVIRON = os.environ | {"COLUMNS": "80", "LINES": "24", "TERM": "xterm"}


class Terminal:
    """A terminal in which the view of a run is open, until the end of the block."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._seen = b""

    def __enter__(self) -> Terminal:
        self._terminal, end = pty.openpty()
        command = [*PIPEFILL, str(self._run), "--every", "0.2"]
        self._top = subprocess.Popen(command, stdin=end, stdout=end, stderr=end, env=ENVIRON)
        os.close(end)
        self.wait_for(b"q quit")
        return self

    def __exit__(self, *_: object) -> None:
        os.write(self._terminal, b"q")
        assert self._top.wait(30) == 0
        os.close(self._terminal)

    def press(self, keys: bytes) -> None:
        self._seen = b""
        os.write(self._terminal, keys)

    def wait_for(self, text: bytes) -> None:
        def shown() -> bool:
            self._seen += os.read(self._terminal, 65536)
            return text in self._seen

        until(shown)


def test_its_keys_pause_resume_and_drain(run):
    page = ControlPage.create(0)
    page.announce(run)
    with Terminal(run) as terminal:
        for key, state in ((b"p", RunState.PAUSED), (b"r", RunState.RUNNING), (b"d", RunState.DRAINING)):
            terminal.press(key)
            terminal.wait_for(state.name.encode() + b" on this node")
            assert page.state is state


def test_keys_that_come_together_all_count_and_arrows_and_function_keys_are_none_of_them(run):
    page = ControlPage.create(0)
    page.announce(run)
    with Terminal(run) as terminal:
        terminal.press(b"dp")
        terminal.wait_for(b"PAUSED on this node")
        word = page.word
        for key in (b"\x1b[D", b"\x1bOP", b"\x1b[1;5D", b"\x1b", b"[D"):  # the last ones are an arrow in two parts
            terminal.press(key)
        terminal.press(b"r")
        terminal.wait_for(b"RUNNING on this node")
        assert page.word == word - RunState.PAUSED + 4  # one change


def test_ranks_that_come_later_are_found_and_a_new_start_of_the_training_is_followed(run):
    first = ControlPage.create(0)
    first.announce(run)
    with Terminal(run) as terminal:
        second = ControlPage.create(1)
        second.announce(run)
        terminal.press(b"p")
        terminal.wait_for(b"PAUSED on this node")
        assert (first.state, second.state) == (RunState.PAUSED, RunState.PAUSED)
        begin_segment(run, "train", 54321)
        restarted = ControlPage.create(0)
        restarted.announce(run)
        terminal.wait_for(b"54,321 ranks")
        terminal.press(b"d")
        terminal.wait_for(b"DRAINING on this node")
        assert restarted.state is RunState.DRAINING
        for note in notes(run):
            note.unlink()
        terminal.press(b"r")
        terminal.wait_for(b"nothing was changed")
        assert restarted.state is RunState.DRAINING


def test_after_the_training_it_shows_the_jobs_that_go_on_without_it(run, capsys):
    records, workers, jobs = synthetic_run()
    lasting = write_segment(run, records)
    name = jobs[1].name
    its = [(replace(jobs[1], status=Status(JobState.RUNNING)), workers[0])]
    (lasting.segment.folder / BETWEEN).mkdir()
    AgentFile(lasting.segment.folder / BETWEEN, 0).show(its)
    view = _View(run)
    Console(width=80).print(view.draw())
    said = capsys.readouterr().out
    assert "the training has ended: by itself" in " ".join(said.split())
    assert name not in said  # nobody serves them any more
    ControlPage.create(0).announce(run)
    Console(width=80).print(view.draw())
    assert f"RUNNING {name}" in capsys.readouterr().out


def test_the_bubbles_of_a_rank_are_the_pipelines(run, capsys):
    (first, other), _, _ = synthetic_run()
    last = first.bubbles[-1]
    save = replace(last, kind=BubbleKind.SAVE, index=-1, end_ns=last.start_ns + 3600 * 10**9)
    write_rank(rank_file(read_segments(run)[-1].folder, 0), replace(first, bubbles=[*first.bubbles, save]))
    Console(width=80).print(_View(run).draw())
    share = next(rank for rank in report_of([first, other], [], []).ranks if rank.rank == 0).bubble_share
    assert f" {share:.0%} " in next(line for line in capsys.readouterr().out.splitlines() if line.startswith("   0"))


def test_a_low_terminal_shows_fewer_ranks_and_its_foot(run, capsys):
    Console(width=80).print(_View(run).draw(rows=1))
    assert "and 1 rank more" in capsys.readouterr().out


def test_a_job_whose_agent_is_gone_does_not_run(run, capsys):
    store = open_store(run)
    store.claim("agent", [store.find("waiting").id], 1e-9, "rank 0")
    store.close()
    Console(width=80).print(_View(run).draw())
    assert "jobs: 0 queued, 0 running, 1 lost" in capsys.readouterr().out


def test_a_store_that_no_agent_has_made_yet_is_not_one_that_does_not_answer(run, capsys):
    begin_segment(run, "train", 2, store=f"sqlite:///{run}/later.db")
    Console(width=80).print(_View(run).draw())
    assert "jobs: the store is not there yet" in capsys.readouterr().out

"""``pipefill top``, in a terminal of 80 columns, with its keys."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from megatron.fill.pages.control import ControlPage, RunState
from megatron.fill.records import begin_segment, rank_file, read_segments, write_agent, write_rank
from megatron.fill.store import open_store
from megatron.fill.work import NewJob, Work
from tests.support.synthetic import synthetic_run
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


def test_its_keys_pause_resume_and_drain(run):
    page = ControlPage.create(0)
    page.announce(run)
    terminal, end = pty.openpty()
    with subprocess.Popen(
        [*PIPEFILL, str(run), "--every", "0.2"], stdin=end, stdout=end, stderr=end, env=ENVIRON
    ) as top:
        os.close(end)
        seen = b""

        def shown(text: bytes) -> bool:
            nonlocal seen
            seen += os.read(terminal, 65536)
            return text in seen

        until(lambda: shown(b"q quit"))
        for key, state in ((b"p", RunState.PAUSED), (b"r", RunState.RUNNING), (b"d", RunState.DRAINING)):
            os.write(terminal, key)
            until(partial(shown, state.name.encode() + b" on this node"))
            assert page.state is state
        os.write(terminal, b"q")
        assert top.wait() == 0
    os.close(terminal)

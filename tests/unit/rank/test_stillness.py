"""A training in which nothing moves any more: what the rank's own thread sees, and what is said from outside."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.fill.cli import main
from megatron.fill.pages.board import CycleBoard, CycleBoardReader, Pulse
from megatron.fill.pages.control import ControlPage
from megatron.fill.pages.moving import RankStanding, find_standings, stillness
from megatron.fill.rank.stillness import StillnessWatch
from megatron.fill.store import open_store
from megatron.fill.types import BubbleKind, RankInfo
from megatron.fill.work import NewJob, Work
from tests.support.children import Child
from tests.support.waiting import until

S = 1_000_000_000
NODE = os.uname().nodename
pytestmark = pytest.mark.usefixtures("own_pages")


@dataclass
class Rank:
    """A training's rank, as its listener tells of it."""

    moved_ns: int = 0
    iteration: int = 0
    longest_ns: int = 0
    waits: tuple[BubbleKind, int] | None = None


class Watched:
    """A watch whose time is the test's."""

    def __init__(self) -> None:
        self.rank, self.now_ns, self.shown = Rank(), 1000 * S, list[Pulse]()
        info = RankInfo(1, 4, 1, 4, 0, 1, 1, 4)
        self.watch = StillnessWatch(self.rank, info, self.shown.append, lambda: self.now_ns)  # type: ignore[arg-type]

    def after(self, seconds: float) -> Pulse:
        self.now_ns += int(seconds * S)
        return self.watch.look()

    def iterations(self, seconds: float, each_s: float) -> None:
        """Iterations of this length, with a look every ten seconds."""
        end_ns = self.now_ns + int(seconds * S)
        while self.now_ns < end_ns:
            self.now_ns += int(10 * S)
            self.rank.iteration += max(1, int(10 / each_s))
            self.rank.moved_ns, self.rank.longest_ns = self.now_ns - 1, int(each_s * S)
            self.watch.look()


def test_a_hang_is_said_once_with_whom_it_waits_for_and_that_it_is_over(caplog):
    watched = Watched()
    watched.iterations(60, 0.3)
    watched.rank.waits = BubbleKind.FWD_BWD, watched.now_ns
    assert watched.after(10).still_s(watched.now_ns) == 0
    assert watched.after(10).still_s(watched.now_ns) == 0
    for _ in range(6):
        watched.after(10)
    [record] = caplog.records
    assert record.getMessage() == (
        "rank 1 (stage 1): nothing has moved for 30 s, and the longest before was 0.3 s: it waits for stage 2, for its "
        "first backward (fwd-bwd bubble), for 30 s; pipefill status tells of all ranks"
    )
    watched.rank.moved_ns, watched.rank.waits = watched.now_ns, None
    watched.after(1)
    assert caplog.records[-1].getMessage() == "rank 1 (stage 1): the training moves again"
    for _ in range(9):  # shorter than ten times that rest, which has come to an end
        watched.after(10)
    assert len(caplog.records) == 2


def test_the_patience_is_ten_times_the_longest_iteration(caplog):
    watched = Watched()
    watched.iterations(300, 20)
    watched.after(199)
    assert caplog.text == ""
    watched.after(2)
    assert "nothing has moved for 201 s, and the longest before was 20.0 s: it is in no bubble" in caplog.text


def test_before_the_first_iteration_has_ended_there_is_more_patience(caplog):
    watched = Watched()
    watched.after(299)
    assert caplog.text == ""
    watched.after(2)
    assert "nothing has moved for 301 s" in caplog.text


pulses = st.builds(
    Pulse,
    *(st.integers(1, 2**62) for _ in range(2)),
    st.integers(0, 2**40),
    st.integers(0, 2**62),
    st.none() | st.sampled_from(BubbleKind),
    st.integers(0, 2**62),
    st.integers(0, 63),
    st.integers(64, 128),
)


@given(st.lists(pulses, min_size=1, max_size=3))
def test_a_board_shows_the_latest_pulse(shown):
    board = CycleBoard()
    reader = CycleBoardReader(board.reader_fd())
    assert reader.pulse() is None
    for pulse in shown:
        board.beat(pulse)
    read = reader.pulse()
    assert read is not None
    assert read.waits == shown[-1].waits
    assert (read.looked_ns, read.moved_ns, read.longest_ns) == (
        shown[-1].looked_ns,
        shown[-1].moved_ns,
        shown[-1].longest_ns,
    )
    assert (read.iteration, read.stage, read.stages) == (shown[-1].iteration, shown[-1].stage, shown[-1].stages)
    assert reader.version == 0  # of the cycle


def standing(rank: int, state: str = "S", waits: BubbleKind | None = None, still_s: float = 50) -> RankStanding:
    now_ns = 1000 * S
    moved_ns = now_ns - int(still_s * S)
    return RankStanding(rank, 100 + rank, state, Pulse(now_ns, moved_ns, 7, S // 4, waits, moved_ns + S, rank, 4))


def test_who_waits_for_whom_is_said_for_every_rank():
    first, *rest = stillness(
        [
            standing(0, waits=BubbleKind.DRAIN),
            standing(1, waits=BubbleKind.FILL),
            standing(2, "T"),
            standing(3, ""),
        ],
        1000 * S,
    )
    assert first.startswith("nothing has moved in iteration 7 since ")
    assert first.endswith(", for 50 s, and the longest before was 0.2 s:")
    assert rest == [
        "  rank 0 (stage 0): waits for all stages, in a collective after its last backward (drain bubble), for 49 s",
        "  rank 1 (stage 1): waits for stage 0, for its first forward (fill bubble), for 49 s",
        "  rank 2 (stage 2): its process 102 is stopped; kill -CONT 102 continues it",
        "  rank 3 (stage 3): its process 103 is gone",
    ]


def test_nothing_is_said_of_a_training_that_moves_and_a_stopped_rank_at_once():
    assert stillness([standing(0, still_s=20), standing(1, still_s=1)], 1000 * S) == []
    assert stillness([standing(0, still_s=1), standing(1, "T", still_s=1)], 1000 * S) == [
        "rank 1 (stage 1): its process 101 is stopped; kill -CONT 101 continues it"
    ]


def test_a_rank_that_does_not_even_look_is_still_since_its_last_word():
    [first, line] = stillness([standing(0, still_s=1)], 1045 * S)
    assert "for 46 s" in first
    assert line == "  rank 0 (stage 0): its process 100 has not even looked around for 45 s"


def said(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command prints, without its line breaks."""
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit):
        main()
    return " ".join(capsys.readouterr().out.split())


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, Callable[[int, float], Child]]:
    """A run folder, and what starts a rank of it whose iterations stopped so many seconds ago."""

    def start(rank: int, still_s: float) -> Child:
        def body(out: int) -> None:
            page, board = ControlPage.create(rank), CycleBoard()
            moved_ns = time.monotonic_ns() - int(still_s * S)
            board.seal()
            page.announce(tmp_path, board.fd)
            for told in itertools.count():
                now_ns = time.monotonic_ns()
                board.beat(Pulse(now_ns, moved_ns, 7, S // 4, BubbleKind.INTERIOR, moved_ns, rank, 2))
                if not told:
                    os.write(out, b"ready")
                time.sleep(0.5)

        child = Child(body)
        assert os.read(child.out, 5) == b"ready"
        return child

    return tmp_path, start


def test_status_tells_of_a_hang_and_of_a_rank_that_is_stopped(run, monkeypatch, capsys):
    folder, start = run
    first, second = start(0, 50), start(1, 50)
    try:
        os.kill(second.pid, signal.SIGSTOP)
        until(lambda: find_standings(folder)[1].stopped)
        with closing(open_store(folder)) as store:
            [job] = store.submit([NewJob("spin", Work(command=("true",)))])
            listing = ["pipefill", "list", "--store", str(folder)]
            assert "nothing has moved" not in said(listing, monkeypatch, capsys)  # no job runs
            assert store.claim("rank 0", [job.id], 60) is not None
        assert "nothing has moved in iteration 7 since" in said(listing, monkeypatch, capsys)
        shown = said(["pipefill", "status", str(folder)], monkeypatch, capsys)
        assert "nothing has moved in iteration 7 since" in shown
        assert "rank 0 (stage 0): waits for a neighbouring stage (interior bubble), for " in shown
        assert f"rank 1 (stage 1): its process {second.pid} is stopped" in shown
        assert len(json.loads(said(["pipefill", "status", str(folder), "--json"], monkeypatch, capsys))["still"]) == 3
    finally:
        first.end()
        second.end()
    assert [one.gone for one in find_standings(folder)] == [True, True]


def test_a_note_that_leads_elsewhere_tells_nothing(run):
    folder, start = run
    child = start(0, 50)
    try:
        path = folder / "control" / NODE / "rank0.json"
        note = json.loads(path.read_text())
        for wrong in (None, -1, "x", note["fd"], 10**6):
            path.write_text(json.dumps(note | {"board": wrong}))
            assert find_standings(folder)[0].pulse is None
        for text in ("[]", "{}", '{"pid": "x"}', ""):
            path.write_text(text)
            assert find_standings(folder) == []
    finally:
        child.end()

"""The rank's listener: what it records, when it fills, and how little it does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.fill.pages.board import CycleBoard, CycleBoardReader
from megatron.fill.profiles import BubbleSlot
from megatron.fill.rank.brake import Brake
from megatron.fill.rank.listener import RankListener
from megatron.fill.rank.predictor import BubblePredictor
from megatron.fill.rank.recorder import Recorder
from megatron.fill.rank.rule import FillRule
from megatron.fill.types import MOST_SETTLING, BrakeEvent, BubbleKind, CycleKey, RankInfo, fills_block
from tests.support.fakes import FakeGate

MS = 1_000_000
KEY = CycleKey("1f1b", 4)
EVALUATION = CycleKey("1f1b", 4, forward_only=True)
INFO = RankInfo(0, 2, 0, 2, 0, 1, 0, 2)


def make(gate: FakeGate | None, guard_ns: int = 0, **settings: Any) -> RankListener:
    predictor = BubblePredictor(FillRule(warmup=2, guard_ns=guard_ns))
    return RankListener(gate, Recorder(INFO, 3), predictor, lambda: 7, **settings)


class Drive:
    def __init__(self, listener: RankListener) -> None:
        self.listener, self.now_ns, self.number = listener, 0, 0

    def cycle(self, *durations_ms: float, key: CycleKey = KEY) -> None:
        self.listener.cycle_started(key, self.now_ns)
        for index, duration in enumerate(durations_ms):
            self.listener.bubble_opened(BubbleKind.INTERIOR, index, self.now_ns)
            self.now_ns += int(duration * MS)
            self.listener.bubble_closed(self.now_ns)

    def iteration(self, *durations_ms: float, compute_ms: float = 5) -> None:
        self.number += 1
        self.listener.iteration_started(self.number, self.now_ns)
        self.cycle(*durations_ms)
        self.now_ns += int(compute_ms * MS)
        self.listener.iteration_ended(self.now_ns)


def test_filling_starts_after_the_warmup_and_leaves_short_bubbles_alone():
    listener = make(FakeGate())
    drive = Drive(listener)
    for _ in range(4):
        drive.iteration(20, 0.5)
    bubbles = listener.recorder.bubbles
    assert [bubble.filling for bubble in bubbles] == [False] * 4 + [True] * 4
    assert [bubble.seq for bubble in bubbles] == [0, 0, 0, 0, 1, 0, 2, 0]
    assert [bubble.predicted_ns for bubble in bubbles[4:6]] == [20 * MS, MS // 2]
    assert bubbles[-1].free_bytes == 7


def test_evaluations_of_a_training_without_iterations_are_filled_after_as_many_schedules():
    board = CycleBoard()
    listener = make(FakeGate(), board=board)
    drive = Drive(listener)
    for _ in range(4):
        drive.cycle(20, key=EVALUATION)
        drive.now_ns += 5 * MS
    bubbles = listener.recorder.bubbles
    assert [(bubble.filling, bubble.seq) for bubble in bubbles] == [(False, 0), (False, 0), (True, 1), (True, 2)]
    assert all(bubble.forward_only for bubble in bubbles)
    shown = CycleBoardReader(board.reader_fd()).read()
    assert shown is not None
    assert (shown.period_ns, shown.slots) == (25 * MS, (BubbleSlot(BubbleKind.INTERIOR, 20 * MS, 7),))
    drive.iteration(20)  # it begins with its own warm-up
    assert not bubbles[-1].filling


class Deadlines(FakeGate):
    """Keeps for how long each bubble was opened, in ms."""

    def __init__(self, drive: list[Drive]) -> None:
        super().__init__()
        self.drive = drive
        self.lasts: list[float] = []
        self.steps_ns: list[Sequence[int]] = []

    def open(self, deadline_ns: int, free_bytes: int, ends_ns: Sequence[int] = (), steps_ns: Sequence[int] = ()) -> int:
        self.lasts.append((deadline_ns - self.drive[0].now_ns) / MS)
        self.steps_ns.append(steps_ns)
        return super().open(deadline_ns, free_bytes, ends_ns, steps_ns)


def test_after_a_brake_overruns_may_cost_nothing():
    drives: list[Drive] = []
    gate = Deadlines(drives)
    brake = Brake(0.01, 0, say=lambda text: None)
    listener = RankListener(gate, Recorder(INFO, 3), BubblePredictor(FillRule(warmup=2)), lambda: 7, brake=brake)
    drives.append(Drive(listener))
    for number in range(5):
        drives[0].iteration(20 + 10 * (number % 2))
    assert max(gate.steps_ns[-1]) > 0
    brake.events.append(BrakeEvent(5, 0.1, 5, 6, 0))
    drives[0].iteration(20)
    assert gate.steps_ns[-1] == ()
    assert gate.lasts[-1] == 20


def test_of_paired_blocks_each_kind_comes_first_in_turn():
    listener = make(FakeGate(), paired_blocks=2)
    drive = Drive(listener)
    for _ in range(10):
        drive.iteration(20)
    iterations = listener.recorder.iterations
    assert [iteration.block for iteration in iterations] == [-1, -1, 0, 0, 1, 1, 2, 2, 3, 3]
    filled = [iteration.filling for iteration in iterations if iteration.block >= 0]
    assert filled == [True] * 2 + [False] * 4 + [True] * 2
    assert [iteration.iteration for iteration in iterations] == list(range(1, 11))


def test_the_middle_of_a_block_without_filling_is_not_watched():
    listener = make(FakeGate(), paired_blocks=3)
    drive = Drive(listener)
    for _ in range(2 + 12):
        drive.number += 1
        listener.iteration_started(drive.number, drive.now_ns)
        if listener.watching:
            drive.cycle(20)
        drive.now_ns += 5 * MS
        listener.iteration_ended(drive.now_ns)
    iterations = listener.recorder.iterations
    assert [one.iteration - 3 for one in iterations if not one.watched] == [4, 7]  # in blocks 1 and 2
    assert {one.block: one.filling for one in iterations[2:]} == {0: True, 1: False, 2: False, 3: True}
    # The cycle before it does not count as long as two.
    assert all(bubble.predicted_ns == 20 * MS for bubble in listener.recorder.bubbles[2:])


def test_a_relay_s_listener_watches_what_it_is_told():
    listener = make(None, paired_blocks=3)
    for number, watched in enumerate((True, False, True), 1):
        listener.iteration_started(number, 0, watched)
        listener.iteration_ended(1)
    assert [one.watched for one in listener.recorder.iterations] == [True, False, True]


class Switch:
    def __init__(self, settled: bool = True) -> None:
        self.running, self.settled = True, settled


def test_paired_blocks_begin_with_the_pair_after_the_jobs_have_settled():
    switch = Switch(settled=False)
    listener = make(FakeGate(), paired_blocks=2, control=switch)
    drive = Drive(listener)
    for number in range(1, 17):
        switch.settled = number > 8  # in the middle of the second pair
        drive.iteration(20)
    iterations = listener.recorder.iterations
    # The third pair, blocks 4 and 5, is the first that counts: its number is that of a rank that settled earlier.
    assert [iteration.block for iteration in iterations] == [-1] * 10 + [4, 4, 5, 5, 6, 6]
    assert [iteration.filling for iteration in iterations] == [False] * 2 + [True] * 8 + [True] * 2 + [False] * 4
    assert all(bubble.seq for bubble in listener.recorder.bubbles[2:12])  # the gate is open while they settle


def test_paired_blocks_begin_after_a_while_whatever_the_jobs_do():
    listener = make(FakeGate(), paired_blocks=10, control=Switch(settled=False), brake=Brake(0.01, 0, paired_blocks=10))
    drive = Drive(listener)
    for _ in range(2 + MOST_SETTLING + 10):
        drive.iteration(20)
    blocks = [iteration.block for iteration in listener.recorder.iterations]
    assert blocks == [-1] * (2 + MOST_SETTLING) + [MOST_SETTLING // 10] * 10


def test_the_brake_is_told_once_that_jobs_have_settled(monkeypatch):
    switch, brake = Switch(settled=False), Brake(0.01, 0)
    drive = Drive(make(FakeGate(), control=switch, brake=brake))
    told: list[int] = []
    monkeypatch.setattr(brake, "jobs_settled", lambda: told.append(drive.number))
    for number in range(1, 9):
        switch.settled = number > 5
        drive.iteration(20)
    assert told == [6]


def test_a_drift_favours_neither_kind_of_block_and_the_warm_up_is_without():
    assert [block for block in range(-1, 12) if fills_block(block)] == [0, 3, 4, 7, 8, 11]


def test_without_a_gate_it_only_measures():
    listener = make(None)
    drive = Drive(listener)
    for _ in range(5):
        drive.iteration(20)
    assert not any(bubble.filling or bubble.seq for bubble in listener.recorder.bubbles)
    assert len(listener.recorder.bubbles) == 5


def test_the_iteration_after_an_evaluation_is_not_filled_and_the_next_one_is():
    listener = make(FakeGate())
    drive = Drive(listener)
    for _ in range(4):
        drive.iteration(20)
    drive.cycle(3, key=CycleKey("1f1b", 4, forward_only=True))
    listener.disturbed("evaluation")
    drive.iteration(90)
    drive.iteration(20)
    seqs = [bubble.seq for bubble in listener.recorder.bubbles]
    assert seqs == [0, 0, 1, 2, 0, 0, 3]
    assert listener.recorder.bubbles[-1].predicted_ns == 20 * MS
    assert [bubble.forward_only for bubble in listener.recorder.bubbles][4]


def test_the_guard_is_kept_free():
    gate = FakeGate()
    listener = make(gate, guard_ns=3 * MS)
    drive = Drive(listener)
    for _ in range(2):
        drive.iteration(20)
    listener.iteration_started(3, drive.now_ns)
    listener.cycle_started(KEY, drive.now_ns)
    listener.bubble_opened(BubbleKind.INTERIOR, 0, drive.now_ns)
    bubble = gate.wait(0)
    assert bubble is not None
    assert bubble.deadline_ns == drive.now_ns + 17 * MS


def test_a_long_run_keeps_sums_of_its_older_bubbles():
    recorder = Recorder(INFO, 3, kept_bubbles=100)
    listener = RankListener(FakeGate(), recorder, BubblePredictor(FillRule(warmup=2)), lambda: 7)
    drive = Drive(listener)
    for _ in range(500):
        drive.iteration(20)
    bubbles = listener.recorder.bubbles
    assert len(bubbles) <= 100
    assert sum(bubble.duration_ns for bubble in bubbles) == 500 * 20 * MS
    assert sum(bubble.duration_ns for bubble in bubbles if bubble.filling) == 498 * 20 * MS


def test_while_paused_no_bubble_is_opened_and_none_counts_as_fillable():
    switch = Switch()
    listener = make(FakeGate(), control=switch)
    drive = Drive(listener)
    for running in (True, True, True, False, False, True):
        switch.running = running
        drive.iteration(20)
    bubbles, iterations = listener.recorder.bubbles, listener.recorder.iterations
    assert [bubble.seq for bubble in bubbles] == [0, 0, 1, 0, 0, 2]
    assert [bubble.filling for bubble in bubbles] == [False, False, True, False, False, True]
    assert [iteration.filling for iteration in iterations] == [False, False, True, False, False, True]


def test_a_pause_within_an_iteration_takes_effect_with_the_next_bubble_and_so_does_its_end():
    switch = Switch()
    listener = make(FakeGate(), control=switch, paired_blocks=10)
    drive = Drive(listener)
    for _ in range(2):
        drive.iteration(20, 20, 20, 20)
    listener.iteration_started(3, drive.now_ns)
    listener.cycle_started(KEY, drive.now_ns)
    for index, running in enumerate((True, False, False, True)):
        switch.running = running
        listener.bubble_opened(BubbleKind.INTERIOR, index, drive.now_ns)
        listener.bubble_closed(drive.now_ns + 20 * MS)
    listener.iteration_ended(drive.now_ns + 80 * MS)
    drive.iteration(20, 20, 20, 20)
    assert [bubble.filling for bubble in listener.recorder.bubbles[8:12]] == [True, False, False, True]
    # It is neither an iteration with filling nor one without: no pair of blocks counts it.
    assert [(item.filling, item.block) for item in listener.recorder.iterations[2:]] == [(False, -1), (True, 0)]


def braking(**settings: int) -> tuple[RankListener, Drive, list[str]]:
    said: list[str] = []
    listener = make(FakeGate(), brake=Brake(0.01, 0, say=said.append, **settings), **settings)
    return listener, Drive(listener), said


def test_the_brake_turns_filling_off_and_is_recorded():
    listener, drive, said = braking(guard_ns=MS)
    while not said:
        assert drive.number < 60
        on = drive.number >= 2 and (drive.number + 2) % 4 != 0
        drive.iteration(20, compute_ms=100 if on else 80)
    assert not listener.filling
    assert isinstance(listener.gate, FakeGate)
    assert listener.gate.braked  # so that the agent stops what goes on all the same
    assert len(listener.recorder.record().brakes) == 1
    assert listener.guard_ns > MS
    event = listener.recorder.brakes[0]
    while drive.number < event.until - 1:
        drive.iteration(20, compute_ms=80)
        assert not listener.filling
        assert not listener.recorder.bubbles[-1].filling
    drive.iteration(20, compute_ms=80)
    assert listener.filling
    assert not listener.gate.braked
    assert len(said) == 2


def test_the_brake_does_not_count_what_was_disturbed_or_paused():
    listener, drive, said = braking()
    switch = listener.control = Switch()
    for number in range(400):
        if number % 5 == 0:
            listener.disturbed("evaluation")
        switch.running = number % 7 != 0
        odd = number % 5 == 0 or number % 7 == 0
        drive.iteration(20, compute_ms=500 if odd else 80)
    assert said == []


def test_the_iteration_in_which_a_graph_is_captured_is_disturbed_as_is_the_next(monkeypatch):
    listener, drive, _ = braking()
    for _ in range(4):
        drive.iteration(20)
    odd: list[bool] = []
    monkeypatch.setattr(listener.brake, "observe", lambda _, disturbed: odd.append(disturbed))
    drive.iteration(20)
    listener.iteration_started(drive.number + 1, drive.now_ns)
    drive.cycle(20)
    listener.disturbed("graph capture")
    listener.iteration_ended(drive.now_ns)
    drive.iteration(20)
    drive.iteration(20)
    assert odd == [False, True, True, False]


def test_shut_ends_the_gate():
    gate = FakeGate()
    make(gate).shut()
    assert gate.ended


def test_the_cycle_is_shown_before_filling_starts_and_again_later():
    board = CycleBoard()
    reader = CycleBoardReader(board.reader_fd())
    listener = RankListener(None, Recorder(INFO, 3), BubblePredictor(FillRule(warmup=50)), lambda: 7, board=board)
    drive = Drive(listener)
    for _ in range(4):
        drive.iteration(20, 0.5)
    assert reader.read() is None
    drive.iteration(20, 0.5)
    cycle = reader.read()
    assert cycle is not None
    assert cycle.period_ns == int(25.5 * MS)
    assert cycle.slots == (
        BubbleSlot(BubbleKind.INTERIOR, 20 * MS, 7),
        BubbleSlot(BubbleKind.INTERIOR, 0, 7),  # too short to be filled
    )
    version = reader.version
    for _ in range(20):
        drive.iteration(30, 0.5)
    assert reader.version > version
    assert not any(bubble.filling for bubble in listener.recorder.bubbles)


def shown(reader: CycleBoardReader) -> list[int]:
    cycle = reader.read()
    assert cycle is not None
    return [slot.free_bytes for slot in cycle.slots]


def test_memory_that_a_job_gives_back_is_shown_at_once_and_what_the_main_job_takes_after_a_disturbance():
    board, free_mib = CycleBoard(), [1000]
    predictor = BubblePredictor(FillRule(warmup=2))
    listener = RankListener(FakeGate(), Recorder(INFO, 3), predictor, lambda: free_mib[0] << 20, board=board)
    drive, reader = Drive(listener), CycleBoardReader(board.reader_fd())
    for _ in range(3):
        drive.iteration(20)
    assert shown(reader) == [1000 << 20]
    free_mib[0] = 500
    drive.iteration(20)
    assert shown(reader) == [1000 << 20]  # with the next look, after 20 iterations
    listener.disturbed("an evaluation")
    drive.iteration(20)
    drive.iteration(20)
    assert shown(reader) == [500 << 20]
    free_mib[0] = 530
    drive.iteration(20)
    assert shown(reader) == [500 << 20]  # hardly more
    free_mib[0] = 900
    drive.iteration(20)
    assert shown(reader) == [900 << 20]


def test_a_bubble_that_was_not_there_since_the_last_look_keeps_its_memory_on_the_board():
    board = CycleBoard()
    predictor = BubblePredictor(FillRule(warmup=2))
    listener = RankListener(FakeGate(), Recorder(INFO, 3), predictor, lambda: 1000 << 20, board=board)
    drive, reader = Drive(listener), CycleBoardReader(board.reader_fd())
    for _ in range(30):
        drive.iteration(20, 30)
    listener.disturbed("a checkpoint")
    drive.iteration(20)
    assert shown(reader) == [1000 << 20] * 2
    drive.iteration(20)
    listener.disturbed("a checkpoint")
    drive.iteration(20)
    assert shown(reader) == [1000 << 20] * 2

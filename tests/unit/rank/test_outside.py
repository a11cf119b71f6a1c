"""Waits outside the pipeline: predicted by the last ones at their place, and no part of the cycle."""

from __future__ import annotations

from functools import partial
from threading import Thread

from megatron.fill.hooks import BubbleBus
from megatron.fill.pages.board import CycleBoard, CycleBoardReader
from megatron.fill.pages.ring import Ring, RingReader
from megatron.fill.rank.listener import RankListener
from megatron.fill.rank.outside import OutsidePredictor
from megatron.fill.rank.predictor import BubblePredictor
from megatron.fill.rank.recorder import Recorder
from megatron.fill.rank.rule import FillRule
from megatron.fill.rank.stream import StreamListener
from megatron.fill.types import Bubble, BubbleKind, CycleKey
from tests.support.fakes import FakeGate
from tests.unit.rank.test_hooks import Heard, make
from tests.unit.rank.test_rank import INFO, MS, Drive

TRAINING = CycleKey("1f1b", 1)


class Cpu:
    """The time for which a process has used its cores, in ns."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns


def test_the_shortest_of_the_last_waits_at_the_same_place():
    predictor = OutsidePredictor(MS, Cpu())
    found = []
    for duration_ms in (50, 80, 30, 60, 60, 60, 60, 60, 60):
        found.append(predictor.forecast(BubbleKind.SAVE, 3).shortest_ns // MS)
        predictor.observe(duration_ms * MS)
    assert found == [0, 50, 50, 30, 30, 30, 30, 30, 60]
    assert not predictor.forecast(BubbleKind.SAVE, 4).fills
    assert not predictor.forecast(BubbleKind.DATA, 3).fills
    assert not predictor.forecast(BubbleKind.SAVE, 3, evaluating=True).fills
    assert predictor.forecast(BubbleKind.SAVE, 3).fills


def test_a_wait_in_which_the_rank_works_is_not_filled():
    cpu = Cpu()
    predictor = OutsidePredictor(MS, cpu)
    for busy_ms in (1, 20):
        predictor.forecast(BubbleKind.DATA, 0)
        cpu.ns += busy_ms * MS
        assert predictor.observe(50 * MS) is (busy_ms == 1)
        assert predictor.forecast(BubbleKind.DATA, 0).fills is (busy_ms == 1)


def run(saves_ms: tuple[float, ...], batch_ms: float = 0.0, board: CycleBoard | None = None) -> RankListener:
    """Iterations of one bubble of 20 ms; each has a batch, and after each comes a save with one wait."""
    listener = RankListener(FakeGate(), Recorder(INFO, 3), BubblePredictor(FillRule(warmup=2)), lambda: 7, board=board)
    drive = Drive(listener)

    def outside(kind: BubbleKind, duration_ms: float) -> None:
        listener.bubble_opened(kind, 0, drive.now_ns)
        drive.now_ns += int(duration_ms * MS)
        listener.bubble_closed(drive.now_ns)

    for save_ms in saves_ms:
        drive.number += 1
        listener.iteration_started(drive.number, drive.now_ns)
        outside(BubbleKind.DATA, batch_ms)
        drive.cycle(20)
        listener.iteration_ended(drive.now_ns)
        outside(BubbleKind.SAVE, save_ms)
    return listener


def of(listener: RankListener, kind: BubbleKind) -> list[Bubble]:
    return [bubble for bubble in listener.recorder.bubbles if bubble.kind is kind]


def test_waits_are_filled_from_the_second_one_on_while_filling_is_on():
    saves = of(run((40, 40, 30, 40, 40)), BubbleKind.SAVE)
    assert [bubble.filling for bubble in saves] == [False, False, True, True, True]
    assert [bool(bubble.seq) for bubble in saves] == [False, False, True, True, True]
    assert [bubble.predicted_ns // MS for bubble in saves] == [0, 40, 40, 30, 30]


def test_the_cycle_stays_as_without_them():
    boards = [CycleBoard(), CycleBoard()]
    plain, with_waits = run((0.0,) * 6, board=boards[0]), run((40.0,) * 6, 10.0, boards[1])
    assert of(plain, BubbleKind.SAVE) == of(plain, BubbleKind.DATA) == []  # too short to be recorded
    assert len(of(with_waits, BubbleKind.DATA)) == 6
    cycles = [CycleBoardReader(board.fd).read() for board in boards]
    assert cycles[0] is not None
    assert cycles[1] is not None
    assert cycles[0].slots == cycles[1].slots
    inner = [[bubble.predicted_ns for bubble in of(one, BubbleKind.INTERIOR)] for one in (plain, with_waits)]
    assert inner[0] == inner[1]


def test_batches_of_evaluations_are_predicted_apart_from_those_of_iterations():
    gate = FakeGate()
    listener = RankListener(gate, Recorder(INFO, 3), BubblePredictor(FillRule(warmup=2)), lambda: 7)
    drive = Drive(listener)
    evaluation = CycleKey("1f1b", 1, forward_only=True)
    for _ in range(3):
        for key, batch_ms in ((TRAINING, 0.1), (evaluation, 40), (evaluation, 40)):
            if not key.forward_only:
                drive.number += 1
                listener.iteration_started(drive.number, drive.now_ns)
            listener.cycle_started(key, drive.now_ns)
            listener.bubble_opened(BubbleKind.DATA, 0, drive.now_ns)
            drive.now_ns += int(batch_ms * MS)
            listener.bubble_closed(drive.now_ns)
            if not key.forward_only:
                listener.iteration_ended(drive.now_ns)
    batches = of(listener, BubbleKind.DATA)
    assert [bubble.duration_ns // MS for bubble in batches] == [40] * 6  # those of iterations are too short
    assert [bubble.predicted_ns // MS for bubble in batches] == [0, 40, 40, 40, 40, 40]
    assert [bool(bubble.seq) for bubble in batches] == [False] * 4 + [True] * 2  # after the warm-up
    assert all(bubble.forward_only for bubble in batches)
    listener.bubble_opened(BubbleKind.SAVE, 0, drive.now_ns)  # after the evaluation, and no part of it
    drive.now_ns += 40 * MS
    listener.bubble_closed(drive.now_ns)
    assert [bubble.forward_only for bubble in of(listener, BubbleKind.SAVE)] == [False]


def test_the_bus_numbers_the_batches_of_each_schedule_of_an_evaluation():
    bus, heard = make()
    for _ in range(2):
        bus.begin_schedule(CycleKey("1f1b", 2, forward_only=True))
        for _ in range(2):
            bus.wait_for_batch(int)
        bus.end_schedule()
        bus.wait_for_batch(int)  # outside
    assert heard.bubbles == 2 * [("data", 0), ("data", 1)]


def test_the_bus_numbers_them_in_each_save_and_iteration():
    bus, heard = make()
    nothing = object()
    assert bus.wait_in_save(lambda: nothing) is bus.wait_for_batch(lambda: nothing) is nothing
    assert heard.bubbles == []
    for number in (1, 2):
        bus.begin_iteration(number)
        for _ in range(2):
            bus.wait_for_batch(int)
        bus.wait_in_save(int)
        bus.end_iteration()
        with bus.saving():
            for _ in range(2):
                bus.wait_in_save(int)
    assert heard.bubbles == 2 * [("data", 0), ("data", 1), ("save", 0), ("save", 1)]


def test_the_bus_numbers_the_waits_for_the_own_stage_between_passes():
    bus, heard = make()
    bus.wait_for_group(int, "data group")  # before the first iteration
    for number in (1, 2):
        bus.begin_iteration(number)
        bus.wait_for_group(int, "data group")
        bus.begin_schedule(CycleKey("1f1b", 1))
        bus.in_pass += 1
        bus.wait_for_group(int, "data group")
        bus.in_pass -= 1
        bus.wait_for_group(int, "data group")
        bus.end_schedule()
        bus.end_iteration()
        bus.wait_for_group(int, "data group")
        with bus.saving():
            bus.wait_for_group(int, "data group")
    assert heard.bubbles == 2 * [("group", 0), ("group", 1), ("save", 0)]


def test_a_wait_for_the_own_stage_is_no_second_bubble_inside_another():
    bus, heard = make()
    bus.begin_iteration(1)
    bus.begin_schedule(CycleKey("1f1b", 1))
    bus.open()
    bus.wait_for_group(int, "data group")
    bus.close()
    assert heard.bubbles == [("fill", 0)]


def test_what_another_thread_waits_for_while_the_rank_saves_has_no_place():
    bus, heard = make()
    with bus.saving():
        bus.wait_in_save(int)
        other = Thread(target=bus.wait_in_save, args=(int,))
        other.start()
        other.join()
        bus.wait_in_save(int)
    assert heard.bubbles == [("save", 0), ("save", 1)]


def test_what_another_thread_waits_for_in_an_iteration_has_no_place():
    bus, heard = make()
    bus.begin_iteration(1)
    for wait in (bus.wait_for_batch, partial(bus.wait_for_group, name="data group")):
        wait(int)
        other = Thread(target=wait, args=(int,))
        other.start()
        other.join()
        wait(int)
    assert heard.bubbles == [("data", 0), ("data", 1), ("group", 0), ("group", 1)]


def test_a_wait_that_fails_ends_its_bubble():
    bus, heard = BubbleBus(), Heard()
    bus.listener = heard
    bus.begin_iteration(1)
    try:
        bus.wait_for_batch(lambda: next(iter(())))
    except StopIteration:
        assert [event[0] for event in heard.events[-2:]] == ["bubble_opened", "bubble_closed"]
    else:
        raise AssertionError


def test_on_a_gpu_they_are_left_out():
    class Marks:
        def mark(self) -> None:
            """The device is never there."""

    ring = Ring()
    reader = RingReader(ring.fd)
    listener = StreamListener(ring, Marks())
    for kind in (BubbleKind.DATA, BubbleKind.SAVE, BubbleKind.DRAIN):
        listener.bubble_opened(kind, 0, 0)
        listener.bubble_closed(1)
    entries = [entry for _ in range(9) for entry in reader.take()]
    assert [entry.text for entry in entries if entry.text] == ["drain"]
    assert len(entries) == 2

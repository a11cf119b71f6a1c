"""What a task does on a device that does not preempt, beyond its known steps: in bubbles only, and held between."""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.fill.errors import TaskError
from megatron.fill.pages.gate import OpenBubble
from megatron.fill.pages.steplog import StepLog, WorkerPhase, create_log
from megatron.fill.profiles import Configuration
from megatron.fill.sidetask.base import SideTask, TaskContext, TaskState
from megatron.fill.sidetask.machine import TaskMachine
from megatron.fill.work import Work
from megatron.fill.worker import profiler
from megatron.fill.worker.loop import StepLoop
from megatron.fill.worker.pacing import Pacer, StepDevice, StepPages, Stopped
from megatron.fill.worker.profiler import measure_nodes
from megatron.fill.worker.saver import Saver
from tests.support.fakes import FakeGate

MS = 1_000_000
SHORT, LONG = 4, 20


class PlayedGate:
    """Bubbles of given lengths on a clock of its own; each wait goes on to the next one, 100 ms later."""

    def __init__(self, lengths_ms: list[float]) -> None:
        self.now_ns = 0
        self.left = deque(lengths_ms)
        self.bubble = OpenBubble(0, 0, 0, 0)
        self.ends_ns = {0: 0}

    def clock(self) -> int:
        return self.now_ns

    def wait(self, after_seq: int) -> OpenBubble:
        self.now_ns = max(self.now_ns, self.bubble.deadline_ns) + 100 * MS
        end_ns = self.now_ns + int(self.left.popleft() * MS)
        self.bubble = OpenBubble(self.bubble.seq + 1, self.now_ns, end_ns, 1 << 40)
        self.ends_ns[self.bubble.seq] = end_ns
        return self.bubble

    def wait_change(self, seq: int, timeout_ns: int) -> None:
        self.now_ns += timeout_ns

    def is_open(self, seq: int) -> bool:
        return self.now_ns < self.ends_ns[seq]

    def closed_ns(self, seq: int) -> int | None:
        return None if self.is_open(seq) else self.ends_ns[seq]

    def over_since(self, seq: int, until_ns: int) -> list[tuple[int, int]]:
        raise AssertionError("this device does not preempt")

    @property
    def ended(self) -> bool:
        return not self.left


class Bench:
    """A pacer whose timer the test rings."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lengths_ms: list[float]) -> None:
        monkeypatch.setattr("megatron.fill.worker.pacing.signal.setitimer", lambda *_: (0.0, 0.0))
        self.gate = PlayedGate(lengths_ms)
        self.log = StepLog(create_log())
        self.said: list[str] = []
        self.stop = False
        self.control = SimpleNamespace(running=True)
        self.baton = SimpleNamespace(
            hold=lambda: self.said.append("hold"), pass_on=lambda seq: self.said.append(f"pass {seq}")
        )
        self.pages = StepPages(self.gate, self.log, self.baton, self.control)  # type: ignore[arg-type]
        device = StepDevice(
            launch=lambda: self.said.append("launch"),
            synchronize=lambda: self.said.append("synchronize"),
            land=lambda: self.said.append("land"),
        )
        self.pacer = Pacer(self.pages, lambda: self.stop, device, self.gate.clock)

    def ring(self) -> None:
        """Outside of turns the timer does not run."""
        if getattr(signal.getsignal(signal.SIGALRM), "__self__", None) is self.pacer:
            signal.raise_signal(signal.SIGALRM)

    def run(self, *lengths_ms: float) -> list[int]:
        """One call of a task after the other, between which the timer rings; the bubbles that they began in."""
        begun = []
        for length_ms in lengths_ms:
            self.ring()
            begun.append(self.gate.bubble.seq)
            self.gate.now_ns += int(length_ms * MS)
        return begun


SEEN = [SHORT] * 15 + [LONG]  # what is seen before it is known which bubbles are long


def test_a_turn_begins_in_one_of_the_longest_bubbles(monkeypatch):
    bench = Bench(monkeypatch, [*SEEN, SHORT, LONG * 0.9, LONG, LONG])
    with bench.pacer.turn("init()") as turn:
        assert bench.gate.bubble.seq == 16  # the first of which it can be said
        assert bench.run(1) == [16]
    assert turn.bubbles == 1
    with bench.pacer.turn("init()"):
        assert bench.gate.bubble.seq == 18
    passed = [f"pass {seq}" for seq in range(1, 16)]
    assert bench.said == [
        *("hold", *passed, "launch", "synchronize", "land", "pass 16"),
        *("hold", "pass 17", "launch", "synchronize", "land", "pass 18"),
    ]


def test_a_bubble_that_was_longer_than_ever_is_not_waited_for_again(monkeypatch):
    bench = Bench(monkeypatch, [45, *[LONG] * 60])
    with bench.pacer.turn("init()"):
        assert bench.gate.bubble.seq == 49


def test_where_no_bubble_is_known_to_last_any_one_will_do_in_the_end(monkeypatch, caplog):
    bench = Bench(monkeypatch, [10.0] * 130)
    told = bench.gate.wait

    def wait(after_seq: int) -> OpenBubble:  # each is open for 10 ms, and nothing of that was predicted
        return replace(told(after_seq), deadline_ns=bench.gate.now_ns - 1)

    bench.gate.wait = wait  # type: ignore[method-assign]
    with bench.pacer.turn("init()") as turn:
        assert bench.gate.bubble.seq == 97
        assert bench.run(4, 4, 4, 1) == [97, 97, 97, 97 + 17]  # held when it is over, and then as patient
    assert turn.late_ns == 2 * MS
    assert "init(): of none of 96 bubbles was it known that it lasts: any one will do" in caplog.text


def test_it_is_held_from_the_end_of_its_bubble_to_the_next_one(monkeypatch):
    bench = Bench(monkeypatch, [*SEEN, SHORT, SHORT, LONG, LONG])
    with bench.pacer.turn("init()") as turn:
        bench.said.clear()
        begun = bench.run(*[6] * 6)
        bench.ring()
    # The fourth call ends 4 ms after its bubble, the others in the short ones 2 ms after theirs.
    assert begun == [16, 16, 16, 16, 17, 18]
    assert (turn.bubbles, turn.late_ns, turn.held_ns) == (4, 4 * MS, 300 * MS)
    held = ["land", "pass 16", "launch", "land", "pass 17", "launch", "land", "pass 18", "launch"]
    assert bench.said == [*held, "synchronize", "land", "pass 19"]


def test_a_signal_that_comes_while_one_is_looked_after_does_nothing(monkeypatch):
    bench = Bench(monkeypatch, [*SEEN, LONG, LONG, LONG])
    is_open = bench.gate.is_open

    def rings(seq: int) -> bool:
        bench.gate.is_open = is_open  # type: ignore[method-assign]
        bench.ring()
        return is_open(seq)

    with bench.pacer.turn("init()") as turn:
        bench.gate.now_ns += LONG * MS
        bench.gate.is_open = rings  # type: ignore[method-assign]
        assert bench.run(1) == [17]
    assert (turn.bubbles, bench.said.count("launch"), bench.said.count("land")) == (2, 2, 2)


def test_what_goes_on_after_its_bubble_is_said(monkeypatch, caplog):
    bench = Bench(monkeypatch, [*SEEN, LONG, LONG])
    with bench.pacer.turn("init()"):
        bench.run(320, 1)
    assert "init() went on for 300 ms after the end of a bubble, beside the main job" in caplog.text
    assert "the longest ones are of 20 ms" in caplog.text


def test_a_pause_by_the_operator_holds_it_too(monkeypatch):
    bench = Bench(monkeypatch, [*SEEN, LONG, LONG, LONG])

    def wait(after_seq: int, wait=bench.gate.wait) -> OpenBubble:
        bench.control.running = bench.gate.bubble.seq != 16
        return wait(after_seq)

    bench.gate.wait = wait  # type: ignore[method-assign]
    with bench.pacer.turn("init()"):
        bench.control.running = False
        assert bench.run(1) == [18]


def test_who_waits_is_between_bubbles_and_not_overdue(monkeypatch):
    bench = Bench(monkeypatch, [*SEEN, LONG, LONG])
    seen = []

    def wait(after_seq: int, wait=bench.gate.wait) -> OpenBubble:
        seen.append((bench.log.phase, bench.log.step_seq))
        return wait(after_seq)

    bench.log.phase = WorkerPhase.INIT
    bench.gate.wait = wait  # type: ignore[method-assign]
    with bench.pacer.turn("init()"):
        bench.log.step_seq = 16
        bench.run(LONG, 1)
        assert (bench.log.phase, bench.log.step_seq) == (WorkerPhase.INIT, 17)
    assert set(seen) == {(WorkerPhase.ASLEEP, 0)}


def test_when_asked_to_stop_a_start_is_given_up_and_a_copy_of_the_state_is_not(monkeypatch):
    bench = Bench(monkeypatch, [*SEEN, LONG, LONG])
    bench.stop = True
    with pytest.raises(Stopped), bench.pacer.turn("init()"):
        raise AssertionError("it must not begin")
    with bench.pacer.turn("state_dict()", must=True) as turn:
        pass
    assert bench.said == ["hold", "hold", "synchronize"]
    assert turn.held_ns == 0
    bench.stop = False

    def stop_in_it() -> None:
        with bench.pacer.turn("init()"):
            bench.stop = True
            bench.run(LONG, 1)

    with pytest.raises(Stopped):
        stop_in_it()
    assert bench.said[-2:] == ["land", "pass 16"]  # once


def test_what_does_not_use_the_device_is_not_held(monkeypatch):
    bench = Bench(monkeypatch, [*SEEN, SHORT, LONG, LONG])
    with bench.pacer.turn("init()") as turn:
        bench.said.clear()
        with bench.pacer.aside():
            assert bench.said == ["synchronize", "land", "pass 16"]
            assert bench.run(500) == [16]  # nothing rings
        assert bench.said[3:] == ["launch"]
        assert bench.run(5, 1) == [17, 18]  # from here on it is held again
    assert (turn.bubbles, turn.late_ns) == (3, 1 * MS)
    with bench.pacer.aside():
        pass
    assert bench.said[4:] == ["land", "pass 17", "launch", "synchronize", "land", "pass 18"]


def test_once_the_main_job_is_over_nothing_is_waited_for(monkeypatch):
    bench = Bench(monkeypatch, [])
    with bench.pacer.turn("init()") as turn:
        pass
    assert (turn.bubbles, bench.said) == (1, ["hold", "synchronize"])


def test_the_timer_rings_and_its_handler_goes_away():
    gate, over = FakeGate(), threading.Event()
    pacer = Pacer(StepPages(gate, StepLog(create_log())), lambda: False)

    def train() -> None:
        while not over.is_set():
            gate.open(time.monotonic_ns() + 10 * MS, 0)
            time.sleep(0.01)
            gate.close(time.monotonic_ns())
            time.sleep(0.002)

    before = signal.getsignal(signal.SIGALRM)
    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    try:
        with pacer.turn("init()") as turn:
            while turn.bubbles < 4:
                sum(range(1000))
    finally:
        over.set()
        thread.join()
    assert turn.held_ns > 0
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL)[1] == 0.0  # whoever had it before has it again


class Stepping(SideTask):
    def __init__(self, bench: Bench, lengths_ms: list[float]) -> None:
        self.bench, self.lengths = bench, deque(lengths_ms)

    def run_next_step(self) -> float:
        if not self.lengths:
            raise StopIteration
        for part_ms in (self.lengths[0] / 2, self.lengths.popleft() / 2):
            self.bench.run(part_ms)
        return 1.0


def loop_over(bench: Bench, lengths_ms: list[float], **settings: Any) -> StepLoop:
    machine = TaskMachine(Stepping(bench, lengths_ms), TaskContext("t", Path("/")))
    machine.create({})
    machine.init()
    pages = StepPages(bench.gate, bench.log)
    return StepLoop(machine, pages, lambda: False, pacer=bench.pacer, clock=bench.gate.clock, **settings)


def test_a_step_that_nobody_knows_begins_in_a_long_bubble_only(monkeypatch):
    bench = Bench(monkeypatch, [*SEEN, SHORT, LONG, LONG, SHORT, SHORT])
    loop_over(bench, [3.0] * 5 + [6.0]).run()
    uses = bench.log.record("t", 0).uses
    # After that it is known that six of 3 ms fit, and that none of 6 ms does.
    assert [(use.seq, use.steps) for use in uses if use.steps] == [(16, 6)]


def test_a_step_that_nobody_knows_is_held_and_counts_for_its_own_bubble_only(monkeypatch):
    bench = Bench(monkeypatch, [*SEEN, LONG, LONG, LONG])
    loop = loop_over(bench, [50])
    loop.run()
    (use,) = [use for use in bench.log.record("t", 0).uses if use.steps]
    assert (use.seq, use.harvested_ns, use.overrun_ns) == (16, LONG * MS, 5 * MS)
    assert loop.estimators.estimate_ns(0) == 50 * MS  # without the time in which it was held


def test_the_first_step_of_a_kind_is_held_whatever_its_profile_says(monkeypatch):
    bench = Bench(monkeypatch, [*SEEN, LONG, LONG, LONG])
    loop = loop_over(bench, [50, 50])
    loop.estimators.expect([5 * MS])
    loop.run()
    first, *_ = [use for use in bench.log.record("t", 0).uses if use.steps]
    assert (first.seq, first.harvested_ns, first.overrun_ns) == (16, LONG * MS, 5 * MS)


def test_no_step_is_tried_in_a_bubble_that_is_short(monkeypatch):
    bench = Bench(monkeypatch, [*SEEN, LONG, *[SHORT] * 8, LONG, *[SHORT] * 5])
    loop_over(bench, [30, 1, 1, 1], probe_after=3, patience=100).run()
    uses = bench.log.record("t", 0).uses
    assert [(use.seq, use.steps) for use in uses if use.steps] == [(16, 1), (26, 3)]


def test_a_first_step_that_took_long_keeps_the_next_one_from_few_bubbles(monkeypatch):
    """It loaded kernels; the other steps take a thirtieth."""
    bench = Bench(monkeypatch, [*SEEN, LONG, *[LONG] * 9])
    loop_over(bench, [30, *[1] * 200], first_after=4).run()
    uses = bench.log.record("t", 0).uses
    assert [use.seq for use in uses if use.steps][:3] == [16, 20, 21]


@pytest.mark.parametrize("seen", ["init", "state"])
def test_the_profiler_and_the_saver_take_turns(tmp_path, monkeypatch, seen):
    said: list[str] = []

    class Turns:
        def __init__(self, what: str, must: bool = False) -> None:
            self.what, self.must = what, must

        def __enter__(self) -> None:
            said.append(f"{self.what} {self.must}")

        def __exit__(self, *_: object) -> None:
            said.append("end")

    def note(word: str):
        return lambda *_: said.append(word)

    if seen == "init":
        nodes = SimpleNamespace(configurations=lambda: [Configuration(1), Configuration(2)])
        machine = SimpleNamespace(nodes=nodes, exhausted=False, begin=note("begin"), init=note("init"))
        machine.state = TaskState.CREATED
        monkeypatch.setattr(profiler, "MeasuringMachine", lambda *_: machine)
        machine.create = machine.stop = lambda *_: None
        machine.meter = SimpleNamespace(forget=note("forget"))
        machine.profile = lambda configuration: (_ for _ in ()).throw(RuntimeError("it is not measured here"))
        with pytest.raises(TaskError, match="it is not measured here"):
            measure_nodes(Work("tests.unit.worker.test_nodes:Task"), TaskContext("t", tmp_path), lambda _: True, Turns)  # type: ignore[arg-type]
        turn = ["begin", "init", "forget", "end"]
        assert said == [f"preparing {Configuration(1)} False", *turn, f"preparing {Configuration(2)} False", *turn]
    else:
        machine = SimpleNamespace(state_dict=note("state"))
        log = StepLog(create_log())
        Saver(machine, tmp_path, 1.0, log, Turns).save()  # type: ignore[arg-type]
        assert said == ["state_dict() True", "state", "end"]

"""The inside of a worker, on a clock that only steps move."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.fill.errors import TaskError
from megatron.fill.pages.baton import Baton
from megatron.fill.pages.gate import OpenBubble
from megatron.fill.pages.steplog import StepLog, WorkerPhase, create_log
from megatron.fill.profiles import Configuration, JobProfile, NodeProfile
from megatron.fill.sidetask.base import SideTask, TaskContext, TaskState
from megatron.fill.sidetask.machine import TaskMachine
from megatron.fill.types import BubbleUse, Lack
from megatron.fill.worker.loop import StepLoop
from megatron.fill.worker.pacing import PLAIN, StepDevice, StepPages
from tests.support.clock import Clock

MS = 1_000_000


class Scripted(SideTask):
    """Steps of given lengths; then it is finished."""

    def __init__(self, clock: Clock[int], lengths_ms: list[float]) -> None:
        self.clock, self.lengths = clock, list(lengths_ms)
        self.calls: list[str] = []
        self.pauses_ms: list[float] = []

    def start(self) -> None:
        self.calls.append("start")

    def pause(self) -> None:
        self.calls.append("pause")
        if self.pauses_ms:
            self.clock.now += int(self.pauses_ms.pop(0) * MS)

    def run_next_step(self) -> float:
        if not self.lengths:
            raise StopIteration
        self.calls.append("step")
        self.clock.now += int(self.lengths.pop(0) * MS)
        return 2.0


class ScriptedGate:
    """A gate whose bubbles really end at ``end_ns``, whatever was predicted."""

    ended = False

    def __init__(self, clock: Clock[int]) -> None:
        self.clock, self.end_ns = clock, 0
        self.others: dict[int, tuple[int, int]] = {}  # start and end of further bubbles, by number

    def wait(self, after_seq: int) -> OpenBubble | None:
        raise AssertionError("nobody sleeps here")

    def is_open(self, seq: int) -> bool:
        return self.clock.now < self.end_ns

    def wait_change(self, seq: int, timeout_ns: int) -> None:
        self.clock.now = max(self.clock.now, min(self.clock.now + timeout_ns, self.end_ns))

    def closed_ns(self, seq: int) -> int | None:
        return None if self.is_open(seq) else self.end_ns

    def over_since(self, seq: int, until_ns: int) -> list[tuple[int, int]]:
        return [
            (number, end - start) for number, (start, end) in self.others.items() if number > seq and end <= until_ns
        ]


class Switch:
    running = settled = True


class Bench:
    def __init__(self, *lengths_ms: float, device: StepDevice = PLAIN) -> None:
        self.clock = Clock(0)
        self.task = Scripted(self.clock, list(lengths_ms))
        machine = TaskMachine(self.task, TaskContext("t", Path("/")))
        machine.create({})
        machine.init()
        self.log = StepLog(create_log())
        self.gate = ScriptedGate(self.clock)
        self.stop = False
        self.switch = Switch()
        pages = StepPages(self.gate, self.log, control=self.switch)
        self.loop = StepLoop(machine, pages, lambda: self.stop, device, clock=self.clock)
        self.seq = 0

    def bubble(
        self,
        predicted_ms: float,
        lasts_ms: float | None = None,
        ends_ns: tuple[int, ...] = (),
        steps_ns: tuple[int, ...] = (),
    ) -> bool:
        """Offer one bubble; whether the task finished in it."""
        self.seq += 1
        self.gate.end_ns = self.clock.now + int((predicted_ms if lasts_ms is None else lasts_ms) * MS)
        deadline_ns = self.clock.now + int(predicted_ms * MS)
        bubble = OpenBubble(self.seq, self.clock.now, deadline_ns, 0, False, ends_ns, steps_ns)
        finished = self.loop.fill(bubble)
        self.clock.now = max(self.clock.now, self.gate.end_ns)
        return finished

    @property
    def uses(self):
        return self.log.record("t", 0).uses


def test_steps_run_while_the_next_one_fits():
    bench = Bench(*[2.0] * 20)
    bench.bubble(9)
    assert bench.task.calls == ["start", *["step"] * 4, "pause"]
    assert (bench.uses[0].harvested_ns, bench.uses[0].overrun_ns, bench.uses[0].steps) == (8 * MS, 0, 4)


def test_a_bubble_that_ends_early_stops_the_steps_and_counts_the_overrun():
    bench = Bench(*[2.0] * 20)
    bench.bubble(9, lasts_ms=3)
    assert bench.task.calls.count("step") == 2
    assert (bench.uses[0].harvested_ns, bench.uses[0].overrun_ns) == (3 * MS, 1 * MS)


@pytest.mark.parametrize("preemptive", [True, False])
def test_whole_bubbles_in_which_an_interrupted_step_goes_on_are_harvested_where_it_gets_the_core(preemptive):
    bench = Bench(20.0, 2.0, device=StepDevice(preemptive=preemptive))
    bench.gate.others = {2: (12 * MS, 15 * MS), 3: (18 * MS, 25 * MS)}
    bench.bubble(9)
    uses = [(use.seq, use.harvested_ns // MS, use.overrun_ns // MS, use.steps) for use in bench.uses]
    assert uses == [(1, 9, 11, 1)] + [(2, 3, 0, 0)] * preemptive
    assert bench.log.record("t", 0).harvested_ns == (12 if preemptive else 9) * MS


def test_where_overruns_may_cost_something_steps_go_on_beyond_the_deadline():
    bench = Bench(*[2.0] * 60)
    bench.bubble(9)
    ends_ns = tuple(bench.clock.now + n * 10 * MS for n in range(1, 9))
    steps_ns = (*[2 * MS] * 4, *[MS] * 4)  # half of the cases may catch a step of 2 ms
    bench.bubble(9, lasts_ms=35, ends_ns=ends_ns, steps_ns=steps_ns)
    assert (bench.uses[1].steps, bench.uses[1].overrun_ns) == (18, 1 * MS)
    ends_ns = tuple(bench.clock.now + n * 10 * MS for n in range(1, 9))
    bench.bubble(9, lasts_ms=80, ends_ns=ends_ns, steps_ns=steps_ns)
    assert (bench.uses[2].steps, bench.uses[2].overrun_ns) == (20, 0)


def test_where_most_bubbles_end_soon_the_first_step_waits_until_they_have():
    bench = Bench(*[2.0] * 40)
    bench.bubble(9)
    for lasts_ms, steps in ((0.2, 0), (50, 25)):
        bench.task.calls.clear()
        now_ns = bench.clock.now
        ends_ns = (*[now_ns + MS // 5] * 6, now_ns + 50 * MS, now_ns + 50 * MS)
        bench.bubble(0, lasts_ms, ends_ns, (*[0] * 6, 9 * MS, 9 * MS))
        assert bench.task.calls.count("step") == steps
        use = bench.uses[-1]
        assert (use.held_ns, use.latency_ns) == (MS // 5, 0 if steps else -1)


def test_steps_pause_where_many_bubbles_end_and_go_on_in_those_that_last():
    for lasts_ms, steps, overrun_ms in ((10.5, 5, 0), (60, 24, 0), (81, 35, 1)):
        bench = Bench(*[2.0] * 60)
        bench.bubble(9)
        bench.task.calls.clear()
        at_ns = bench.clock.now
        ends_ns = tuple(at_ns + ms * MS for ms in (10, 10, 11, 11, 12, 50, 60, 80))
        bench.bubble(10, lasts_ms, ends_ns, (0, 0, 0, 0, 0, 2 * MS, 0, 2 * MS))
        assert bench.task.calls == ["start", *["step"] * steps, "pause"]
        assert bench.uses[1].overrun_ns == overrun_ms * MS
        held_ms = {10.5: 0.5, 60: 12, 81: 12}[lasts_ms]  # from 10 to 12 ms, and from 50 to 60 ms
        assert bench.uses[1].held_ns == held_ms * MS


def test_a_bubble_too_short_is_left_alone():
    bench = Bench(*[2.0] * 20)
    bench.bubble(9)
    bench.task.calls.clear()
    bench.bubble(1.5)
    assert bench.task.calls == []
    assert [use.idle for use in bench.uses] == [False, True]
    assert bench.uses[1] == BubbleUse(2, -1, 0, 0, 0, 9 * MS, Lack.TIME)


def test_a_task_whose_steps_seem_too_long_gets_a_try_now_and_then():
    bench = Bench(50.0, *[1.0] * 100)
    bench.bubble(60)
    bench.task.calls.clear()
    for _ in range(40):
        bench.bubble(10)
    assert bench.task.calls.count("step") > 5


def test_where_the_main_job_takes_the_device_back_a_caught_step_says_nothing_of_its_length():
    starved = [2.0, 90.0] * 20
    taken_back, waited_for = Bench(*starved, device=StepDevice(preemptive=True)), Bench(*starved)
    for bench in (taken_back, waited_for):
        for _ in range(10):
            bench.bubble(7, lasts_ms=3)
    assert taken_back.task.calls.count("step") == 20
    assert waited_for.task.calls.count("step") < 20


@pytest.mark.parametrize(("preemptive", "steps"), [(True, 6), (False, 2)])
def test_nor_does_a_caught_pause_and_the_next_bubbles_are_used(preemptive: bool, steps: int):
    bench = Bench(*[2.0] * 20, device=StepDevice(preemptive=preemptive))
    bench.task.pauses_ms = [100.0]
    for _ in range(3):
        bench.bubble(5)
    assert bench.task.calls.count("step") == steps


def test_time_is_left_for_a_pause_that_fits():
    bench = Bench(*[2.0] * 20, device=StepDevice(preemptive=True))
    bench.task.pauses_ms = [1.0] * 3
    for _ in range(3):
        bench.bubble(6.5, lasts_ms=7.5)
    assert bench.task.calls.count("step") == 3 + 2 + 2


def test_a_use_says_when_the_worker_was_done_and_what_was_lacking():
    bench = Bench(*[2.0] * 20, device=StepDevice(preemptive=True))
    bench.task.pauses_ms = [0.5]
    bench.bubble(9)
    assert (bench.uses[0].left_ns, bench.uses[0].lack) == (8.5 * MS, Lack.TIME)
    bench.stop = True
    bench.bubble(9)
    assert (bench.uses[1].left_ns, bench.uses[1].lack) == (9 * MS + 2 * MS, Lack.JOB)
    bench.stop, bench.switch.running = False, False
    bench.bubble(9)
    assert (bench.uses[2].idle, bench.uses[2].left_ns, bench.uses[2].lack) == (True, 18 * MS, Lack.JOB)


def test_it_finishes_when_the_task_does():
    bench = Bench(1.0, 1.0)
    assert bench.bubble(100)
    assert bench.uses[0].lack == Lack.JOB
    assert bench.task.calls == ["start", "step", "step", "pause"]
    assert bench.log.record("t", 0).work_done == 4.0
    assert bench.loop.machine.state is TaskState.PAUSED


def test_a_stop_request_is_seen_between_steps():
    bench = Bench(*[1.0] * 50)
    bench.stop = True
    assert not bench.bubble(100)
    assert bench.task.calls.count("step") == 1


def test_a_pause_is_seen_before_every_step_and_before_the_start(monkeypatch):
    bench = Bench(*[1.0] * 50)

    def step() -> float:
        bench.switch.running = bench.task.calls.count("step") < 2
        return Scripted.run_next_step(bench.task)

    monkeypatch.setattr(bench.task, "run_next_step", step)
    assert not bench.bubble(100)
    assert bench.task.calls == ["start", "step", "step", "step", "pause"]
    bench.task.calls.clear()
    assert not bench.bubble(100)
    assert bench.task.calls == []
    monkeypatch.setattr(bench.task, "run_next_step", lambda: Scripted.run_next_step(bench.task))
    bench.switch.running = True
    bench.bubble(2)
    assert bench.task.calls == ["start", "step", "step", "pause"]


def test_a_pause_during_the_start_lets_no_step_begin(monkeypatch):
    bench = Bench(*[1.0] * 50)
    monkeypatch.setattr(bench.task, "start", lambda: setattr(bench.switch, "running", False))
    assert not bench.bubble(100)
    assert bench.task.calls == ["pause"]
    use = bench.uses[0]
    assert (use.steps, use.latency_ns, use.harvested_ns, use.overrun_ns) == (0, -1, 0, 0)


def test_the_log_says_what_the_worker_is_at(monkeypatch):
    bench = Bench(*[1.0] * 3)
    seen = []
    monkeypatch.setattr(bench.task, "start", lambda: seen.append((bench.log.phase, bench.log.step_seq)))
    bench.bubble(2)
    assert seen == [(WorkerPhase.START, 1)]
    assert (bench.log.phase, bench.log.step_seq) == (WorkerPhase.ASLEEP, 0)


def test_the_work_alone_is_counted_apart():
    bench = Bench(*[1.0] * 10)
    bench.bubble(2.5)
    bench.gate.end_ns = bench.clock.now + 3 * MS
    bench.loop.fill(OpenBubble(9, bench.clock.now, bench.gate.end_ns, 0, alone=True))
    record = bench.log.record("t", 0)
    assert (record.work_done, record.steps_done, record.harvested_ns) == (4.0, 2, 2 * MS)
    assert (record.alone_work, record.alone_ns) == (6.0, 3 * MS)
    assert bench.log.work_done == 10.0
    assert len(record.uses) == 1


class TestMachine:
    def make(self) -> TaskMachine:
        return TaskMachine(Scripted(Clock(0), [1.0]), TaskContext("t", Path("/")))

    def test_callbacks_out_of_order_are_refused(self):
        machine = self.make()
        for callback in (machine.init, machine.start, machine.run_next_step, machine.pause):
            with pytest.raises(TaskError, match="in state SUBMITTED"):
                callback()
        machine.create({})
        with pytest.raises(TaskError, match=r"create\(\) was called in state CREATED; expected SUBMITTED"):
            machine.create({})

    def test_stop_is_allowed_from_anywhere_and_once(self, monkeypatch):
        machine = self.make()
        calls = []
        monkeypatch.setattr(machine.task, "stop", lambda: calls.append(1))
        machine.stop()
        machine.stop()
        assert calls == [1]
        assert machine.state is TaskState.STOPPED

    def test_work_must_be_a_number(self, monkeypatch):
        machine = self.make()
        machine.create({})
        machine.init()
        machine.start()
        monkeypatch.setattr(machine.task, "run_next_step", lambda: "many")
        with pytest.raises(TaskError, match="returned 'many'"):
            machine.run_next_step()
        monkeypatch.setattr(machine.task, "run_next_step", lambda: None)
        assert machine.run_next_step() == 1.0


def test_the_rings_keep_the_most_recent():
    bench = Bench(*[1.0] * 9000)
    for _ in range(9000):
        bench.bubble(1)
    record = bench.log.record("t", 0)
    assert record.steps_done == 9000
    assert len(record.steps) == 8192
    assert record.steps == sorted(record.steps)
    assert len(record.uses) == 9000


class TwoKinds(Scripted):
    """Short and long steps in turn."""

    def run_next_step(self) -> float:
        work = super().run_next_step()
        self.next_node = 1 - self.next_node
        return work


def profile(*nodes: tuple[float, int]) -> JobProfile:
    found = (NodeProfile("n", int(duration_ms * MS), memory) for duration_ms, memory in nodes)
    return JobProfile(Configuration(), tuple(found), 10.0)


def two_kinds(*lengths_ms: float) -> Bench:
    bench = Bench()
    bench.task.__class__ = TwoKinds
    bench.task.lengths = list(lengths_ms)
    return bench


def test_each_kind_of_step_is_expected_to_take_its_own_time():
    bench = two_kinds(*[2, 8] * 50)
    bench.loop.expect(profile((2, 0), (8, 0)))
    for _ in range(10):
        bench.bubble(11)
        bench.bubble(7)
    # At first 2 and 8, then 2; from then on 8 and 2 in every bubble of 11, and the 8 that is next fits in no 7.
    assert bench.task.calls.count("step") == 3 + 9 * 2
    assert sum(use.overrun_ns for use in bench.log.record("t", 0).uses) == 0


def test_a_step_that_needs_more_memory_than_is_free_waits():
    bench = two_kinds(1, 1, 1, 1)
    bench.loop.expect(profile((1, 50), (1, 150)))
    bench.bubble(10)  # 0 bytes are free: node 0 runs, node 1 does not
    assert bench.task.calls.count("step") == 1
    bench.bubble(10)
    assert bench.task.calls.count("step") == 1


def test_no_iteration_begins_while_a_change_is_due():
    bench = two_kinds(1, 1, 1, 1)
    bench.bubble(1.5)
    bench.loop.hold_at_start = True
    bench.bubble(10)
    assert bench.task.calls.count("step") == 2  # the iteration was ended
    bench.loop.hold_at_start = False
    bench.bubble(10)
    assert bench.task.calls.count("step") == 4


def test_the_baton_is_passed_on_in_every_bubble_and_there_is_a_break_after_it():
    class Passed(Baton):
        def __init__(self) -> None:
            self.calls: list[object] = []

        def hold(self) -> None:
            self.calls.append("hold")

        def drop(self) -> None:
            self.calls.append("drop")

        def pass_on(self, seq: int) -> None:
            self.calls.append(seq)

    class Queue(ScriptedGate):
        def __init__(self, clock: Clock[int]) -> None:
            super().__init__(clock)
            self.seq = 0

        def wait(self, after_seq: int) -> OpenBubble:
            self.seq += 1
            self.end_ns = self.clock.now + 10 * MS
            return OpenBubble(self.seq, self.clock.now, self.end_ns, 0)

    bench, passed = Bench(*[4] * 5), Passed()
    gate = Queue(bench.clock)
    breaks: list[int] = []
    loop = StepLoop(bench.loop.machine, StepPages(gate, bench.log, passed), lambda: False, clock=bench.clock)
    loop.between = lambda: breaks.append(gate.seq)
    assert loop.run()
    assert passed.calls == ["hold", 1, 2, 3, "drop"]
    assert breaks == [1, 2]


def test_part_of_an_iteration_is_part_of_its_work():
    class Iterations(TwoKinds):
        def run_next_step(self) -> float:
            last = self.next_node == 1
            super().run_next_step()
            return 8.0 if last else 0.0  # the last batch was smaller than the profile says

    bench = two_kinds(1, 3, 1, 3)
    bench.task.__class__ = Iterations
    bench.loop.expect(profile((1, 0), (3, 0)))
    bench.bubble(1)
    assert (bench.log.work_done, bench.log.partial_work) == (2.5, 2.5)
    bench.bubble(3)
    assert (bench.log.work_done, bench.log.partial_work) == (8.0, 0.0)
    bench.bubble(1)
    assert (bench.log.work_done, bench.log.partial_work) == (10.5, 2.5)


def test_a_look_is_no_part_of_an_iteration():
    class Looking(TwoKinds):
        def run_next_step(self) -> float:
            super().run_next_step()
            self.idle, self.next_node = True, 0
            return 0.0

    bench = two_kinds(1, 1)
    bench.task.__class__ = Looking
    bench.loop.expect(profile((1, 0), (3, 0)))
    bench.bubble(2)
    assert bench.uses[-1].steps == 1
    assert bench.log.work_done == 0


def test_a_step_that_stays_at_its_node_is_no_part_of_an_iteration():
    class Assembling(TwoKinds):
        def run_next_step(self) -> float:
            super().run_next_step()
            self.next_node = 0  # the data have ended, and parts of its file are put together
            return 0.0

    bench = two_kinds(1, 1)
    bench.task.__class__ = Assembling
    bench.loop.expect(profile((1, 0), (3, 0)))
    assert bench.bubble(9)
    assert bench.log.work_done == 0


@pytest.mark.parametrize("measuring", [True, False])
def test_a_task_that_is_measured_does_not_serve_yet(measuring):
    bench = Bench(1.0)
    bench.loop.machine.task.context.measuring = measuring
    bench.gate.ended = True
    bench.clock.now = 7
    assert not bench.loop.run()
    assert bench.log.serving_ns == (0 if measuring else 7)


class Iterations(Scripted):
    """Nodes of a millisecond; the last of each iteration says what the iteration did."""

    nodes, did = 7, 0.3

    def run_next_step(self) -> float:
        super().run_next_step()
        self.next_node = (self.next_node + 1) % self.nodes
        return 0.0 if self.next_node else self.did


def test_whole_iterations_count_exactly():
    bench = Bench()
    bench.task.__class__ = Iterations
    bench.task.lengths = [1.0] * 7 * 40
    bench.loop.expect(profile(*[(1, 0)] * 7))
    for _ in range(100):
        bench.bubble(2.5)
    whole = 0.0
    for _ in range(200 // 7):
        whole += 0.3
    assert bench.log.whole_work == whole
    assert bench.log.partial_work == pytest.approx(10.0 * (200 % 7) / 7)
    for _ in range(40):
        bench.bubble(2.5)
    whole = 0.0
    for _ in range(40):
        whole += 0.3
    assert (bench.log.whole_work, bench.log.work_done, bench.log.partial_work) == (whole, whole, 0.0)
    assert bench.log.record("t", 0).work_done == whole


def test_an_iteration_that_ends_alone_counts_where_its_nodes_ran():
    bench = two_kinds(1, 3, 1, 3)

    class Two(Iterations):
        nodes, did = 2, 8.0

    bench.task.__class__ = Two
    bench.loop.expect(profile((1, 0), (3, 0)))
    bench.bubble(1)
    bench.seq += 1
    bench.gate.end_ns = bench.clock.now + 3 * MS
    bench.loop.fill(OpenBubble(bench.seq, bench.clock.now, bench.gate.end_ns, 0, True))
    record = bench.log.record("t", 0)
    assert (bench.log.work_done, record.work_done, record.alone_work) == (8.0, 2.5, 5.5)


def test_a_profile_says_how_long_the_first_step_of_a_plain_task_takes():
    bench = Bench(*[5.0] * 4)
    bench.loop.estimators.expect([5 * MS])
    bench.bubble(4)
    assert bench.task.calls == []  # without the profile it would have begun, as nothing is known
    bench.bubble(6)
    assert bench.task.calls == ["start", "step", "pause"]
    assert bench.log.work_done == 2  # what the step said, and nothing of the profile's


class Waiting(Scripted):
    """Has something to do in every third step only."""

    def run_next_step(self) -> float:
        work = super().run_next_step()
        self.idle = self.calls.count("step") % 3 != 0
        return work


def test_a_task_with_nothing_to_do_looks_once_in_each_bubble():
    bench = Bench(*[1.0] * 20)
    bench.task.__class__ = Waiting
    for steps in (1, 1, 2, 1):  # the third step has something to do, and so is followed by another one
        bench.bubble(9)
        assert bench.uses[-1].steps == steps
    assert {use.lack for use in bench.uses} == {Lack.JOB}

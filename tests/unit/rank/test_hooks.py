"""The bus classifies waits by what has run before them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from megatron.fill.hooks import BubbleBus, Callback
from megatron.fill.hooks import bus as the_bus
from megatron.fill.types import CycleKey


class Heard:
    """A listener that writes down what it hears."""

    watching = True

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args: self.events.append((name, *args))

    @property
    def bubbles(self) -> list[tuple[str, int]]:
        return [(str(event[1]), event[2]) for event in self.events if event[0] == "bubble_opened"]


def make() -> tuple[BubbleBus, Heard]:
    bus = BubbleBus()
    heard = Heard()
    bus.listener = heard
    return bus, heard


def wait(bus: BubbleBus, for_backward: bool = False) -> None:
    bus.open(for_backward=for_backward)
    bus.close()


class Noting(Callback):
    """A callback that writes down what it is called for."""

    def __init__(self, events: list[tuple[Any, ...]]) -> None:
        self._events = events

    def on_iteration(self) -> None:
        self._events.append(("on_iteration",))

    def on_schedule(self) -> None:
        self._events.append(("on_schedule",))

    def on_wait[T](self, call: Callable[[], T]) -> Callable[[], T]:
        self._events.append(("on_wait",))
        return call

    def on_last_backward(self) -> None:
        self._events.append(("on_last_backward",))


def test_callbacks_come_before_the_listener_and_only_in_training():
    bus, heard = make()
    bus.callbacks += [Callback(), Noting(heard.events)]
    bus.begin_iteration(1)
    bus.begin_schedule(CycleKey("1f1b", 2))
    assert bus.wait(lambda: len(heard.events)) == 6
    bus.close()
    bus.backward(0)
    assert heard.events[-1][0] == "computed"
    bus.backward(0)
    bus.end_schedule()
    bus.end_iteration()
    names = [event[0] for event in heard.events]
    begins = ["on_iteration", "iteration_started", "on_schedule", "cycle_started"]
    passes = ["computed", "on_last_backward", "computed"]
    assert names == [*begins, "on_wait", "bubble_opened", "bubble_closed", *passes, "iteration_ended"]
    bus.begin_schedule(CycleKey("1f1b", 2, forward_only=True))  # an evaluation
    assert bus.wait(lambda: 7) == 7
    bus.close()
    bus.end_schedule()
    assert not [event[0] for event in heard.events[len(names) :] if event[0].startswith("on_")]
    assert bus.wait(lambda: 8) == 8


def test_what_blocks_is_a_bubble_of_its_own_unless_it_is_part_of_one():
    bus, heard = make()
    bus.callbacks.append(Noting(heard.events))
    bus.begin_iteration(1)
    assert not bus.between_passes
    bus.begin_schedule(CycleKey("1f1b", 2))
    assert bus.between_passes
    bus.in_pass += 1
    assert not bus.between_passes
    bus.in_pass -= 1
    assert bus.blocked(lambda: bus.blocked(lambda: 7)) == 7
    bus.open()
    assert bus.blocked(lambda: 8) == 8
    assert [event[0] for event in heard.events].count("bubble_closed") == 1
    bus.close()
    assert heard.bubbles == [("fill", 0), ("fill", 1)]
    assert [event[0] for event in heard.events].count("on_wait") == 1
    bus.end_schedule()
    bus.end_iteration()
    assert not bus.between_passes


def test_an_iteration_without_backwards_has_a_drain_and_is_no_evaluation():
    bus, heard = make()
    noted: list[tuple[Any, ...]] = []
    bus.callbacks.append(Noting(noted))
    bus.begin_iteration(1)
    bus.begin_schedule(CycleKey("1f1b", 2, forward_only=True))  # --freeze-all-layers
    wait(bus)
    bus.forward(0)
    wait(bus)
    assert not bus.in_drain
    bus.forward(0)
    assert bus.in_drain
    bus.end_schedule()
    wait(bus)
    bus.end_iteration()
    assert heard.bubbles == [("fill", 0), ("interior", 1), ("drain", 2)]
    assert ("on_last_backward",) not in noted
    assert [event[1] for event in heard.events if event[0] == "cycle_started"] == [CycleKey("1f1b", 2)]


def test_another_thread_is_in_no_schedule():
    bus, _ = make()
    bus.begin_schedule(CycleKey("1f1b", 2))
    seen: list[bool] = []
    other = threading.Thread(target=lambda: seen.append(bus.between_passes))
    other.start()
    other.join()
    assert seen == [False]
    assert bus.between_passes


def test_1f1b_last_of_two_stages():
    bus, heard = make()
    bus.begin_iteration(1)
    bus.begin_schedule(CycleKey("1f1b", 2))
    wait(bus)
    bus.forward(0)
    bus.backward(0)
    wait(bus)
    bus.forward(0)
    bus.backward(0)
    wait(bus)
    bus.end_schedule()
    wait(bus)
    bus.end_iteration()
    assert heard.bubbles == [("fill", 0), ("interior", 1), ("drain", 2), ("drain", 3)]


def test_1f1b_first_of_two_stages():
    bus, heard = make()
    bus.begin_iteration(1)
    bus.begin_schedule(CycleKey("1f1b", 2))
    bus.forward(0)
    wait(bus)
    bus.forward(0)
    wait(bus, for_backward=True)
    bus.backward(0)
    wait(bus, for_backward=True)
    bus.backward(0)
    bus.end_schedule()
    assert bus.in_drain
    wait(bus)
    bus.end_iteration()
    assert not bus.in_drain
    assert heard.bubbles == [("interior", 0), ("fwd-bwd", 1), ("interior", 2), ("drain", 3)]


def test_interleaved_counts_every_chunk():
    bus, heard = make()
    bus.begin_iteration(1)
    bus.begin_schedule(CycleKey("interleaved", 1, chunks=2))
    bus.forward(0)
    bus.forward(0)
    bus.backward(0)
    assert not bus.in_drain
    bus.backward(0)
    assert bus.in_drain
    assert heard.bubbles == []


def test_evaluation_ends_its_cycle_with_the_schedule():
    bus, heard = make()
    bus.begin_schedule(CycleKey("1f1b", 1, forward_only=True))
    wait(bus)
    bus.forward(0)
    wait(bus)
    bus.end_schedule()
    wait(bus)
    assert heard.bubbles == [("fill", 0), ("drain", 1)]


def test_a_rerun_schedule_numbers_its_bubbles_anew():
    bus, heard = make()
    bus.begin_iteration(1)
    for _ in range(2):
        bus.begin_schedule(CycleKey("1f1b", 1))
        wait(bus)
        bus.end_schedule()
    bus.end_iteration()
    assert heard.bubbles == [("fill", 0), ("fill", 0)]


def test_several_waits_of_one_call_are_one_bubble():
    bus, heard = make()
    bus.begin_schedule(CycleKey("1f1b", 1))
    bus.open()
    bus.open(for_backward=True)
    bus.close()
    bus.close()
    assert heard.bubbles == [("fill", 0)]
    assert [event[0] for event in heard.events] == ["cycle_started", "bubble_opened", "bubble_closed"]


def test_waits_outside_a_schedule_are_no_bubbles():
    bus, heard = make()
    wait(bus)
    bus.begin_iteration(1)
    wait(bus)
    bus.end_iteration()
    assert heard.bubbles == []


def test_a_forked_child_reports_nothing(monkeypatch):
    heard = Heard()
    monkeypatch.setattr(the_bus, "listener", heard)
    with the_bus.saving():
        child = os.fork()
        if not child:
            the_bus.wait_in_save(int)
            os._exit(len(heard.events))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        the_bus.wait_in_save(int)
    assert heard.bubbles == [("save", 0)]


def test_a_listener_that_raises_is_taken_off_and_shut(caplog):
    class Broken(Heard):
        shut_calls = 0

        def bubble_opened(self, *args: Any) -> None:
            raise RuntimeError("boom")

        def shut(self) -> None:
            type(self).shut_calls += 1
            raise RuntimeError("boom again")

    bus = BubbleBus()
    bus.listener = Broken()
    bus.begin_iteration(1)
    bus.begin_schedule(CycleKey("1f1b", 1))
    wait(bus)
    wait(bus)
    bus.end_iteration()
    assert bus.listener is None
    assert Broken.shut_calls == 1
    assert "the training goes on" in caplog.text


def test_of_an_iteration_that_is_not_watched_only_its_start_and_end_are_heard():
    bus, heard = make()
    for number, watching in enumerate((True, False, True)):
        heard.watching = watching
        bus.begin_iteration(number)
        bus.begin_schedule(CycleKey("1f1b", 1))
        assert bus.wait(lambda: "moved") == "moved"
        bus.close()
        bus.forward(0)
        bus.backward(0)
        bus.end_schedule()
        bus.end_iteration()
    names = [event[0] for event in heard.events]
    watched = ["iteration_started", "cycle_started", "bubble_opened", "bubble_closed", "computed", "computed"]
    watched.append("iteration_ended")
    assert names == [*watched, "iteration_started", "iteration_ended", *watched]


def test_an_evaluation_after_an_iteration_that_was_not_watched_is_heard():
    bus, heard = make()
    heard.watching = False
    bus.begin_iteration(1)
    bus.end_iteration()
    bus.begin_schedule(CycleKey("1f1b", 1, forward_only=True))
    assert heard.events[-1][0] == "cycle_started"

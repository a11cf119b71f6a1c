"""The account adds own times of nested brackets, and nothing is counted twice."""

from __future__ import annotations

from megatron.fill.account import LONG_NS, LOOP, START, UNNAMED, Account, Spent
from megatron.fill.hooks import BubbleBus
from megatron.fill.types import CycleKey


class Clock:
    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


def make() -> tuple[Account, Clock]:
    clock = Clock()
    return Account(clock), clock


def ns_of(account: Account) -> dict[str, int]:
    spent = account.snapshot()
    assert sum(one.ns for one in spent.values()) == account.clock() - account._start_ns
    return {name: one.ns for name, one in spent.items() if one.ns}


def test_a_bracket_has_its_own_time_without_that_of_the_brackets_inside():
    account, clock = make()
    clock.now_ns = 5
    account.settle()
    with account.within("forward"):
        clock.now_ns += 10
        with account.within("tensor group"):
            clock.now_ns += 3
        clock.now_ns += 1
    clock.now_ns += 2
    assert ns_of(account) == {"start-up": 5, "forward": 11, "tensor group": 3, UNNAMED: 2}


def test_a_bracket_of_the_start_up_that_goes_on_is_the_training_loop():
    account, clock = make()
    clock.now_ns = 5
    with account.within(START):
        clock.now_ns += 10
        with account.within("load"):
            clock.now_ns += 3
        account.settle()
        account.settle()
        with account.within("forward"):
            clock.now_ns += 7
        clock.now_ns += 1
    clock.now_ns += 2
    assert ns_of(account) == {START: 15, "load": 3, "forward": 7, LOOP: 1, UNNAMED: 2}


def test_a_late_host_counts_from_the_first_iteration_on():
    account, _ = make()
    waited_ns = [7]
    account.without_core = lambda: waited_ns[0]
    assert account.host_late_ns == 0
    account.settle()
    waited_ns[0] = 12
    account.settle()
    assert account.host_late_ns == 5


def test_a_whole_contains_what_is_inside():
    account, clock = make()
    account.settle()
    with account.within("save", whole=True):
        clock.now_ns += LONG_NS
        with account.within("all ranks"), account.within("load", whole=True):
            clock.now_ns += 1
        clock.now_ns += 1
    assert account.snapshot()["save"] == Spent(LONG_NS + 2, LONG_NS + 2, 1)
    with account.within("forward"):
        clock.now_ns += 7
    assert ns_of(account) == {"save": LONG_NS + 2, "forward": 7}


def test_only_stretches_from_a_millisecond_on_are_long():
    account, clock = make()
    account.settle()
    for length_ns in (LONG_NS - 1, LONG_NS):
        with account.within("drain"):
            clock.now_ns += length_ns
    assert account.snapshot()["drain"] == Spent(2 * LONG_NS - 1, LONG_NS, 2)


def test_a_bracket_that_was_left_open_ends_with_the_one_around_it():
    account, clock = make()
    account.settle()
    depth = account.enter("forward")
    account.enter("data group")
    clock.now_ns += 4
    account.leave(depth)
    clock.now_ns += 6
    assert ns_of(account) == {"data group": 4, UNNAMED: 6}


def test_the_running_bracket_is_in_a_snapshot():
    account, clock = make()
    account.settle()
    account.enter("save", whole=True)
    account.enter("all ranks")
    clock.now_ns += 9
    assert ns_of(account) == {"save": 9}


def test_waits_have_the_names_of_their_bubbles():
    bus, clock = BubbleBus(), Clock()
    bus.account = Account(clock)
    assert not bus.waited
    assert bus.computing("forward") == "evaluation"  # of one stage, which has no schedule
    bus.begin_iteration(1)
    assert bus.computing("forward") == "forward"
    bus.begin_schedule(CycleKey("1f1b", 1))
    bus.open()
    clock.now_ns += 5
    assert bus.blocked(lambda: 1)  # part of the open wait
    bus.close()
    bus.forward(0)
    bus.backward(0)
    bus.open()
    bus.open()
    clock.now_ns += 8
    bus.close()
    bus.end_schedule()
    bus.end_iteration()
    bus.begin_schedule(CycleKey("1f1b", 1, forward_only=True))
    assert bus.computing("forward") == "evaluation"
    bus.open()
    clock.now_ns += 2
    bus.close()
    bus.end_schedule()
    assert bus.waited
    assert ns_of(bus.account) == {"fill": 5, "drain": 8, "evaluation wait": 2}

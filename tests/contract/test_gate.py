"""One suite over the real gate and its fake."""

from __future__ import annotations

import os
import threading
import time

import pytest

from megatron.fill.errors import GateError
from megatron.fill.pages.gate import GateReader, GateWriter, OpenBubble, SharedGate, SharedGateReader
from tests.support.fakes import FakeGate


@pytest.fixture(params=["shared", "fake"])
def ends(request: pytest.FixtureRequest) -> tuple[GateWriter, GateReader]:
    if request.param == "fake":
        gate = FakeGate()
        return gate, gate
    writer = SharedGate()
    return writer, SharedGateReader(writer.reader_fd())


def wait_in_thread(reader: GateReader, after_seq: int = 0) -> tuple[threading.Thread, list[OpenBubble | None]]:
    found: list[OpenBubble | None] = []
    thread = threading.Thread(target=lambda: found.append(reader.wait(after_seq)), daemon=True)
    thread.start()
    time.sleep(0.05)  # so that it is asleep, which is the case worth testing
    return thread, found


def test_waiter_sees_the_bubble_that_opens(ends):
    writer, reader = ends
    thread, found = wait_in_thread(reader)
    deadline_ns = time.monotonic_ns() + 10**9
    seq = writer.open(deadline_ns, 4096)
    thread.join(60)
    assert found[0] is not None
    assert (found[0].seq, found[0].deadline_ns, found[0].free_bytes) == (seq, deadline_ns, 4096)
    assert found[0].opened_ns <= time.monotonic_ns()
    assert not found[0].alone


def test_open_bubble_is_returned_at_once_and_only_if_newer(ends):
    writer, reader = ends
    seq = writer.open(10**18, 0)
    assert reader.wait(0).seq == seq
    thread, found = wait_in_thread(reader, after_seq=seq)
    assert found == []
    writer.close(5)
    thread.join(60)
    assert found == [None]


def test_is_open_and_closed_ns_follow_one_bubble(ends):
    writer, reader = ends
    first = writer.open(10**18, 0)
    assert reader.is_open(first)
    assert reader.closed_ns(first) is None
    writer.close(123)
    assert not reader.is_open(first)
    assert reader.closed_ns(first) == 123
    second = writer.open(10**18, 0)
    assert second == first + 1
    assert reader.is_open(second)
    assert not reader.is_open(first)
    assert reader.closed_ns(first) == 123
    assert reader.closed_ns(second) is None


def test_bubbles_that_are_over_are_told_with_their_lengths(ends):
    writer, reader = ends
    starts_ns = {}
    for length_ns in (10, 20, 30):
        seq = writer.open(10**18, 0)
        bubble = reader.wait(seq - 1)
        assert bubble is not None
        starts_ns[seq] = bubble.opened_ns
        writer.close(bubble.opened_ns + length_ns)
    writer.open(10**18, 0)
    assert reader.over_since(1, 1 << 62) == [(2, 20), (3, 30)]
    assert reader.over_since(0, starts_ns[2] + 20) == [(1, 10), (2, 20)]
    assert reader.over_since(3, 1 << 62) == []


def test_close_without_open_does_nothing(ends):
    writer, reader = ends
    writer.close(1)
    seq = writer.open(10**18, 0)
    writer.close(2)
    writer.close(3)
    assert reader.closed_ns(seq) == 2


def test_end_wakes_the_waiter_and_is_final(ends):
    writer, reader = ends
    thread, found = wait_in_thread(reader)
    assert not reader.ended
    writer.end()
    thread.join(60)
    assert found == [None]
    assert reader.ended
    assert reader.wait(0) is None


def test_end_closes_an_open_bubble(ends):
    writer, reader = ends
    seq = writer.open(10**18, 0)
    writer.end()
    assert not reader.is_open(seq)
    assert reader.closed_ns(seq) is not None


def test_a_thousand_bubbles_are_numbered_in_order(ends):
    writer, reader = ends
    for number in range(1, 1001):
        seq = writer.open(10**18, 0)
        assert reader.wait(seq - 1).seq == number
        writer.close(number)
        assert reader.closed_ns(seq) == number


class TestSharedGate:
    """What only the real one must do."""

    def test_the_reader_cannot_write(self):
        fd = SharedGate().reader_fd()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(fd, b"x")
        with pytest.raises(OSError, match=r"Invalid argument|not permitted"):
            os.ftruncate(fd, 0)

    def test_the_file_cannot_shrink_under_the_rank(self):
        gate = SharedGate()
        with pytest.raises(PermissionError):
            os.ftruncate(gate.fd, 0)

    def test_it_has_no_name_in_the_file_system(self):
        before = set(os.listdir("/dev/shm"))
        gate = SharedGate()
        assert set(os.listdir("/dev/shm")) == before
        assert "memfd:" in os.readlink(f"/proc/self/fd/{gate.fd}")

    def test_another_file_is_refused_by_name(self, tmp_path):
        path = tmp_path / "other"
        path.write_bytes(bytes(4096))
        with pytest.raises(GateError, match="is not a gate"):
            SharedGateReader(os.open(path, os.O_RDONLY))

    def test_a_short_file_is_refused(self, tmp_path):
        path = tmp_path / "short"
        path.write_bytes(b"x")
        with pytest.raises(GateError, match="cannot be mapped"):
            SharedGateReader(os.open(path, os.O_RDONLY))

    def test_alone_bubbles_say_so(self):
        gate = SharedGate()
        reader = SharedGateReader(gate.reader_fd())
        gate.open_alone(10**18)
        bubble = reader.wait(0)
        assert bubble is not None
        assert bubble.alone
        gate.close(1)
        gate.open(10**18, 0)
        bubble = reader.wait(0)
        assert bubble is not None
        assert not bubble.alone

    def test_a_sleeping_worker_uses_no_cpu(self):
        gate = SharedGate()
        fd = gate.reader_fd()
        pid = os.fork()
        if pid == 0:
            reader = SharedGateReader(fd)
            begun = time.process_time()
            while not reader.ended:
                reader.wait(0)
            os._exit(0 if time.process_time() - begun < 0.005 else 1)
        time.sleep(1.0)
        gate.end()
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

    def test_a_waiter_looks_around_by_itself(self):
        """The signal that was to make it do so may have come just before its sleep."""
        gate = SharedGate()
        thread, found = wait_in_thread(SharedGateReader(gate.reader_fd()))
        thread.join(30)
        assert found == [None]
        assert not gate.ended

    def test_wait_change_returns_at_the_deadline_and_at_the_close(self):
        gate = SharedGate()
        reader = SharedGateReader(gate.reader_fd())
        seq = gate.open(10**18, 0)
        begun = time.monotonic()
        reader.wait_change(seq, 50_000_000)
        assert time.monotonic() - begun >= 0.05
        assert reader.is_open(seq)
        threading.Timer(0.05, lambda: gate.close(1)).start()
        reader.wait_change(seq, 10**10)
        assert not reader.is_open(seq)

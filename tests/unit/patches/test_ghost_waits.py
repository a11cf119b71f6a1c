"""How ghosts make their rank wait on a stream: the order of what is enqueued, over a stand-in for torch.cuda."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from pipefill_patches.ghost_waits import KERNEL, KERNEL_NAME, StreamWaits


class Event:
    def __init__(self, place: int) -> None:
        self.place = place


class Stream:
    """Keeps what is enqueued, in order; a wait holds until all is done that the other had when it was waited for."""

    def __init__(self, cuda: Cuda, name: str) -> None:
        self.cuda, self.name = cuda, name
        self.work: list[tuple[str, Any]] = []

    def wait_stream(self, other: Stream) -> None:
        self.work.append(("wait", (other, len(other.work))))

    def record_event(self) -> Event:
        event = Event(len(self.work))
        event.stream = self  # type: ignore[attr-defined]
        return event

    def wait_event(self, event: Any) -> None:
        self.work.append(("wait", (event.stream, event.place)))


class Cuda:
    """The streams of one process."""

    def __init__(self) -> None:
        self.compute = self.current = Stream(self, "compute")
        self.streams: list[Stream] = []

    def new_stream(self) -> Stream:
        self.streams.append(Stream(self, f"ghost {len(self.streams)}"))
        return self.streams[-1]

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def compile(self, source: str, name: str) -> Any:
        assert (source, name) == (KERNEL, KERNEL_NAME)
        return lambda args: self.current.work.append(("kernel", args[0]))

    def times(self) -> dict[str, float]:
        """When each stream is done with all that it has, in ns."""
        at: dict[Stream, list[float]] = {stream: [0.0] for stream in (self.compute, *self.streams)}

        def done(stream: Stream, place: int) -> float:
            """When a stream is done with so many of its things."""
            while len(at[stream]) <= place:
                kind, what = stream.work[len(at[stream]) - 1]
                before = at[stream][-1]
                at[stream].append(before + what if kind == "kernel" else max(before, done(*what)))
            return at[stream][place]

        return {stream.name: done(stream, len(stream.work)) for stream in at}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    monkeypatch.setattr(torch.cuda, "Stream", cuda.new_stream)
    monkeypatch.setattr(torch.cuda, "stream", cuda.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: cuda.current)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_compile_kernel", cuda.compile, raising=False)
    return cuda


def waits(cuda: Cuda) -> StreamWaits:
    found = StreamWaits()
    found.prepare()
    assert cuda.compute.work.pop() == ("kernel", 0.0)  # loaded beforehand
    return found


def test_a_transfer_begins_after_the_compute_before_it_and_the_compute_goes_on_after_it(cuda):
    ghost = waits(cuda)
    cuda.compute.work.append(("kernel", 1000.0))
    arrived: list[str] = []
    request = ghost.start(500, lambda: arrived.append(cuda.current.name))
    assert arrived == ["ghost 0"]  # what arrives is written on the stream that waits
    cuda.compute.work.append(("kernel", 200.0))  # beside the transfer
    assert cuda.times() == {"compute": 1200.0, "ghost 0": 1500.0} | {f"ghost {at}": 0.0 for at in range(1, 8)}
    request.wait()
    cuda.compute.work.append(("kernel", 100.0))
    assert cuda.times()["compute"] == 1600.0


def test_two_transfers_at_a_time_do_not_wait_for_each_other(cuda):
    ghost = waits(cuda)
    first, second = ghost.start(500, lambda: None), ghost.start(300, lambda: None)
    second.wait()
    assert cuda.times()["compute"] == 300.0
    first.wait()
    assert cuda.times()["compute"] == 500.0


def test_what_arrives_at_once_needs_no_kernel(cuda):
    ghost = StreamWaits()  # not prepared: in the first iterations nothing waits
    ghost.start(0, lambda: None).wait()
    assert [kind for stream in cuda.streams for kind, _ in stream.work] == ["wait"]


def test_the_kernel_compiles():
    utils = pytest.importorskip("torch.cuda._utils")
    try:
        found = utils._nvrtc_compile(KERNEL, KERNEL_NAME, "90")
    except (OSError, AttributeError) as error:
        pytest.skip(f"NVRTC cannot be had: {error}")
    code = found[0] if isinstance(found, tuple) else found  # PTX, or a module of a GPU's own code
    assert KERNEL_NAME.encode() in (code if isinstance(code, bytes) else str(code).encode())
    assert KERNEL.count("%globaltimer") == 2

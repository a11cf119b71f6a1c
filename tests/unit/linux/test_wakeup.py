"""Waiting for descriptors, also above the numbers that select() can take."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator

import pytest

from megatron.fill.linux.wakeup import readable


@pytest.fixture(params=[0, 1500], ids=["low", "high"])
def pipe(request) -> Iterator[tuple[int, int]]:
    low, writer = os.pipe()
    reader = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, request.param)
    assert reader >= request.param
    yield reader, writer
    for fd in (low, reader, writer):
        os.close(fd)


def test_it_says_which_is_readable(pipe):
    reader, writer = pipe
    other, end = os.pipe()
    assert not readable(0, reader, other)
    os.write(writer, b"x")
    assert list(readable(None, reader, other)) == [reader]
    os.close(end)  # which makes the other readable
    assert sorted(readable(10, reader, other)) == sorted([reader, other])
    os.close(other)


def test_it_sleeps_no_shorter_than_asked(pipe):
    start_s = time.monotonic()
    assert not readable(0.0105, pipe[0])
    assert time.monotonic() - start_s >= 0.0105
    assert not readable(-1, pipe[0])

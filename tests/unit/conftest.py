from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron.fill.sandbox.probe import SandboxSupport, look
from tests.support.children import Child
from tests.support.pages import closed_pages
from tests.support.sandboxed import GUEST, Inside


@pytest.fixture
def child() -> Iterator[Callable[[Callable[[int], None]], Child]]:
    children: list[Child] = []

    def start(body: Callable[[int], None]) -> Child:
        children.append(Child(body))
        return children[-1]

    yield start
    for one in children:
        one.end()


@pytest.fixture
def holder(child: Callable[[Callable[[int], None]], Child]) -> Callable[[Callable[[], object]], Child]:
    """Starts a process that takes something, such as a lock, and keeps it until its end; returns once it has it."""

    def start(take: Callable[[], object]) -> Child:
        def body(out: int) -> None:
            kept = take()
            os.write(out, b"held")
            time.sleep(1000)
            del kept

        one = child(body)
        assert os.read(one.out, 4) == b"held"
        return one

    return start


@pytest.fixture
def own_pages() -> Iterator[None]:
    """The descriptors of pages that the test makes are closed at its end."""
    with closed_pages():
        yield


@pytest.fixture(scope="session")
def support() -> SandboxSupport:
    """What this machine gives."""
    return look(GUEST.uid if GUEST else None, GUEST.gid if GUEST else None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A job's own."""
    made = tmp_path / "jobs" / "job-1"
    made.mkdir(parents=True)
    if GUEST is not None:
        os.chown(made, GUEST.uid, GUEST.gid)
    return made


@pytest.fixture
def inside(folder: Path, support: SandboxSupport) -> Inside:
    return Inside(folder, support)

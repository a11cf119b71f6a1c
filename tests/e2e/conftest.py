"""One warm process for all trainings of these tests, also where two are run at a time."""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import is_controller
from tests.e2e import training

TURNS = "PIPEFILL_TEST_TURNS"  # in the environment of xdist's workers: a folder with the locks that they share
# Each test of these has trainings of its own; those of other files share theirs.
APART = re.compile(r"test_(bench_gpu|ghosts|llm|main_job|memory|relay|strict_gloo|try)\.py")


@pytest.fixture(scope="session", autouse=True)
def warm() -> Iterator[None]:
    """Ranks are forked from it; those that torchrun starts are not, and show that both are the same."""
    with training.warm_ranks():
        yield


def pytest_configure(config: pytest.Config) -> None:
    """What xdist's workers share is made before they start."""
    if not is_controller(config):
        return
    stack = ExitStack()
    config.add_cleanup(stack.close)
    os.environ[TURNS] = stack.enter_context(tempfile.TemporaryDirectory(prefix="pipefill-"))
    stack.callback(os.environ.pop, TURNS)
    stack.enter_context(training.warm_ranks())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests that share trainings are run by the same worker, and the others as workers become free."""
    from xdist.scheduler.loadscope import LoadScopeScheduling

    class Trainings(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, test = nodeid.partition("::")
            if "test_parallelism" in file:
                return test.partition("[")[2]
            return nodeid if APART.search(file) else file

    config.option.loadscopereorder = False  # the dearest are not those with the most tests
    return Trainings(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """One that is to be alone waits until no other is run, and no other begins before it has had its turn."""
    with ExitStack() as held:
        if TURNS in os.environ:
            alone = item.get_closest_marker("alone") is not None
            with ExitStack() as turn:
                _lock(turn, "turn", fcntl.LOCK_EX)
                _lock(held, "running", fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
                if alone:
                    held.enter_context(turn.pop_all())
        return (yield)


def _lock(held: ExitStack, name: str, kind: int) -> None:
    file = held.enter_context((Path(os.environ[TURNS]) / name).open("w"))
    fcntl.flock(file, kind)

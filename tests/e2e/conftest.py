"""One warm process for all trainings of these tests, also where two are run at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.conftest import is_controller
from tests.e2e import training

# Each test of these has trainings of its own; those of other files share theirs.
APART = re.compile(r"test_(bench_gpu|ghosts|llm|main_job|memory|relay|strict_gloo|try)\.py")
# The files with the longest tests, the longest first: begun last, one of them would be run with the other core idle.
LONGEST = ("identity", "chaos", "llm", "memory", "main_job", "gpu_day", "parallelism", "segments", "moves", "fill_jobs")
FILES = [training.HERE / f"test_{name}.py" for name in LONGEST]


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
    stack.enter_context(training.warm_ranks())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests come first; the others keep their order."""
    items.sort(key=lambda item: FILES.index(item.path) if item.path in FILES else len(FILES))


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

"""Fixtures for the whole suite."""

from __future__ import annotations

import functools
import gc
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import typer.main
from hypothesis import HealthCheck, settings

from tests.support.postgres import NoPostgres, PrivatePostgres

LONGEST = {
    *(("slurm", "test_plumbing.py"), ("contract", "test_store.py"), ("examples", "test_task_embed.py")),
    *(("sidetask", "test_models.py"), ("benchmarks", "test_gpu_micro.py"), ("package", "test_install.py")),
}
# No test judges by time.  Where CI is in the environment, hypothesis takes its own profile "ci" in this one's place.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
IN_POSTGRES = ("contract/test_store.py", "store/test_sql.py", "store/test_backup.py", "cli/test_gc.py")


def is_controller(config: pytest.Config) -> bool:
    """True if other processes run the tests (xdist)."""
    return bool(config.getoption("numprocesses", None)) and not hasattr(config, "workerinput")


def give_way(nice: str) -> None:
    """Have the other tests' sessions come first: each of these processes leads one, a group for the scheduler."""
    with suppress(OSError):  # a kernel without such groups, or who may not
        Path("/proc/self/autogroup").write_text(nice, encoding="ascii")


def pytest_configure(config: pytest.Config) -> None:
    """Keep bytecode, and start the process that all workers are forked from, as are Pythons of their tests."""
    # pytest rewrites the assertions of 350 files: without their bytecode, every worker does so in every run.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    if not is_controller(config):
        if nice := os.environ.pop("PIPEFILL_TEST_NICE", ""):
            give_way(nice)
        gc.disable()  # until all tests are collected: the imports of torch and Megatron free next to nothing
        # A thousand calls of ``pipefill`` are run in these processes, and each would build all commands anew.
        typer.main.get_command = functools.cache(typer.main.get_command)
        return
    from tests.e2e.training import HERE, warm

    stack = ExitStack()
    config.add_cleanup(stack.close)
    stack.enter_context(warm())
    # Each worker would import torch and what else the tests use, for 5 s.
    python = shlex.join([sys.executable, str(HERE / "launch.py"), "fresh"])
    config.option.tx = [f"popen//python={python}"] * len(config.option.tx)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first; the others keep their order."""
    items.sort(key=lambda item: (*item.path.parts[-2:],) not in LONGEST)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The tests of a file, and those that need PostgreSQL, share what they make: one process runs them."""
    from xdist.scheduler.loadscope import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "PostgreSQL" if file.endswith(IN_POSTGRES) else file

    config.option.loadscopereorder = False  # the dearest are not those with the most tests
    return Files(config, log)


def pytest_collection_finish() -> None:
    """Collect garbage from here on, among the tests' own objects only."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PrivatePostgres]:
    """A private PostgreSQL; tests that ask for it are skipped where it cannot be run."""
    pytest.importorskip("psycopg", reason="needs the extra postgres")
    try:
        server = PrivatePostgres().__enter__()
    except NoPostgres as error:
        pytest.skip(str(error))
    yield server
    server.__exit__(None, None, None)

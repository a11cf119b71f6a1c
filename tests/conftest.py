"""Fixtures for the whole suite."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.postgres import NoPostgres, PrivatePostgres


def is_controller(config: pytest.Config) -> bool:
    """Whether this process has others run the tests (xdist)."""
    return bool(config.getoption("numprocesses", None)) and not hasattr(config, "workerinput")


def pytest_configure(config: pytest.Config) -> None:
    """The process that Pythons are forked from is one for all workers."""
    if is_controller(config):
        from tests.e2e.training import warm

        stack = ExitStack()
        config.add_cleanup(stack.close)
        stack.enter_context(warm())


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

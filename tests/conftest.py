"""Fixtures for the whole suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.postgres import NoPostgres, PrivatePostgres


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

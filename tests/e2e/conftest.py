"""One warm process for all trainings of these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e import training


@pytest.fixture(scope="session", autouse=True)
def warm() -> Iterator[None]:
    """Ranks are forked from it; those that torchrun starts are not, and show that both are the same."""
    with training.warm_ranks():
        yield

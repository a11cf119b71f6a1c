"""One warm process for all tests of patches that want a Python of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e import training


@pytest.fixture(scope="session", autouse=True)
def warm() -> Iterator[None]:
    with training.warm():
        yield

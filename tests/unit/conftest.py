from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.unit.children import Child


@pytest.fixture
def child() -> Iterator[Callable[[Callable[[int], None]], Child]]:
    children: list[Child] = []

    def start(body: Callable[[int], None]) -> Child:
        children.append(Child(body))
        return children[-1]

    yield start
    for one in children:
        one.end()

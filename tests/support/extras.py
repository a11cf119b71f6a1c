"""Libraries of the extras, which need not be installed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def needs(library: str, extra: str) -> None:
    """Skip a module's tests where the library is not installed.

    It is not imported, as ``pytest.importorskip`` would, in each process that only collects these tests: that takes
    some of them seconds.
    """
    if find_spec(library) is None:
        pytest.skip(f"needs the extra {extra}", allow_module_level=True)

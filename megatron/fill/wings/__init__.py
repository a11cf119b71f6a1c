"""Wings: parts beside the core, which knows none of them; each is optional for a training with ``--fill-jobs``."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Iterator
from types import ModuleType


def modules(name: str) -> Iterator[ModuleType]:
    """Import and yield the module ``name`` of each wing that has one, in the order of the wings' names."""
    for wing in pkgutil.iter_modules(__path__):
        full = f"{__name__}.{wing.name}.{name}"
        if importlib.util.find_spec(full) is not None:
            yield importlib.import_module(full)

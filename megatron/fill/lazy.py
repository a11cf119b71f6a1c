"""Names of a package whose modules are imported when a name is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazily(package: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the package's ``__getattr__``.

    Args:
        package: name of the package.
        names: names in the package's modules, apart by spaces, by module.
    """
    modules = {name: module for module, its in names.items() for name in its.split()}

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return get

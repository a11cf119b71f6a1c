"""``pipefill --version``: the versions of the packages in use, without importing slow ones."""

from __future__ import annotations

import importlib.util
import platform
import runpy
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import typer
from packaging.version import Version


def print_version(wanted: bool) -> None:
    """Print the versions and end, if they are ``wanted``."""
    if not wanted:
        return
    print(f"pipefill {_installed('pipefill')}")
    print(f"megatron-core {megatron_core()}")
    print(f"torch {_installed('torch')}")
    print(f"Python {platform.python_version()}")
    raise typer.Exit


def megatron_core() -> str:
    """Return the version of the megatron.core that would be imported, and its folder if pip did not install it."""
    spec = importlib.util.find_spec("megatron.core")
    if spec is None or spec.origin is None:
        return "not installed"
    folder = Path(spec.origin).parent
    # megatron.core reads its version from this file, which imports no slow module.  The version ends with the commit of
    # the git checkout around the file, if there is one; ``public`` is without it.
    found = Version(runpy.run_path(str(folder / "package_info.py"))["__version__"]).public
    installed = _installed("megatron-core")
    return found if found == installed else f"{found} in {folder} (pip's is {installed})"


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"

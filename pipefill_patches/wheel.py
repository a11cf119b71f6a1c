"""Megatron on CUDA from pip's wheel: it ships the compiled dataset helper, but not the Makefile that it runs at start.

The CPU backend does the same for itself.
"""

from __future__ import annotations

import contextlib

from pipefill_patches.cpu_backend import unless_shipped
from pipefill_patches.registry import Patch, Target, replace

_COMPILE = Target("megatron.core.datasets.utils:compile_helpers", ())


def _install(stack: contextlib.ExitStack) -> None:
    holder, name = _COMPILE.resolve()
    replace(stack, holder, name, unless_shipped(getattr(holder, name)))


PATCH = Patch(
    "wheel", "Megatron compiles its dataset helper with make, and ends where that fails", _install, (_COMPILE,)
)

"""Copies of a task's state."""

from __future__ import annotations

import copy
from typing import Any


def on_cpu(value: Any) -> Any:
    """Copy a state of nested lists and mappings, with all its tensors moved to host memory.

    Tensors that are there already are not copied, since a state is written before the next step changes it.
    """
    if isinstance(value, dict):
        return {key: on_cpu(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(on_cpu(entry) for entry in value)
    return value.detach().cpu() if hasattr(value, "detach") else copy.deepcopy(value)

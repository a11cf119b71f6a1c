"""What a task's state is made of."""

from __future__ import annotations

import copy
from typing import Any


def on_cpu(value: Any) -> Any:
    """With every tensor in host memory, whatever the lists and mappings that they are in.

    What is there already is not copied: a state is written before the next step changes it.
    """
    if isinstance(value, dict):
        return {key: on_cpu(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(on_cpu(entry) for entry in value)
    return value.detach().cpu() if hasattr(value, "detach") else copy.deepcopy(value)

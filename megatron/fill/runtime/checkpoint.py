"""A stopped task's state on disk: written atomically, loaded without running code."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from megatron.fill.errors import TaskError

NAME = "checkpoint.pt"


def save(directory: Path, state: dict[str, Any]) -> None:
    """Write ``state`` to the job's folder; a crash leaves the previous checkpoint in place."""
    import torch

    scratch = directory / (NAME + ".part")
    torch.save(state, scratch)
    os.replace(scratch, directory / NAME)


def load(directory: Path) -> dict[str, Any] | None:
    """The state that was saved in the job's folder; None if there is none.

    Raises:
        TaskError: the file is damaged, or holds more than tensors, numbers, strings and containers of them.
    """
    path = directory / NAME
    if not path.exists():
        return None
    import torch

    try:
        return torch.load(path, weights_only=True)
    except Exception as error:
        raise TaskError(f"{path} cannot be loaded: {' '.join(str(error).split())[:200]}") from error


def discard(directory: Path) -> None:
    (directory / NAME).unlink(missing_ok=True)

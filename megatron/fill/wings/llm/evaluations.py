"""Results of a training's checkpoints: ``evaluations.jsonl`` and TensorBoard's scalars in a job's folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron.fill import untrusted
from megatron.fill.errors import TaskError
from megatron.fill.linux import safefile
from megatron.fill.linux.files import write_text

EVALUATIONS, TENSORBOARD = "evaluations.jsonl", "tensorboard"


def read_evaluations(folder: Path) -> dict[int, dict[str, Any]]:
    """The evaluations of a job's folder, by iteration; none if it has no such file.

    Raises:
        TaskError: the file cannot be read, or is something else.
    """
    path = folder / EVALUATIONS
    try:
        lines = [untrusted.parse_json(line) for line in untrusted.read_text(path).splitlines() if line]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TaskError(f"{path} cannot be read: {error}; expected a line of JSON for each checkpoint") from error
    for number, line in enumerate(lines, 1):
        if not (isinstance(line, dict) and type(line.get("iteration")) is int):
            raise TaskError(f"{path}, line {number}, has no iteration: expected one for each checkpoint")
    return {line["iteration"]: line for line in lines}


def write_evaluations(folder: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Write the file of evaluations anew, whole or not at all."""
    write_text(folder / EVALUATIONS, "".join(json.dumps(line) + "\n" for line in lines))


def write_to_tensorboard(folder: Path, iteration: int, found: dict[str, float], samples: list[dict[str, str]]) -> None:
    """Add the scalars and texts of an evaluation, if TensorBoard is installed: Megatron trains without it too."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return
    with SummaryWriter(str(folder / TENSORBOARD)) as writer:
        for name, value in found.items():
            writer.add_scalar(f"fill/{name}", value, iteration)
        for number, sample in enumerate(samples):
            writer.add_text(f"fill/sample {number}", f"{sample['prompt']}**{sample['text']}**", iteration)


def publish(private: Path, folder: Path) -> None:
    """Bring what is in a folder of our own into a job's, which may belong to another user and have links in it.

    No worker may be in the job's folder meanwhile.  What is new there belongs to whom the folder belongs to.

    Raises:
        OSError: a file cannot be written, or a link is in the way.
    """
    owner = folder.stat()
    _put(private / EVALUATIONS, folder, owner)
    events = list((private / TENSORBOARD).glob("*"))
    if events:
        board = folder / TENSORBOARD
        board.mkdir(exist_ok=True)
        fd = safefile.open_folder(board)
        try:
            _give(fd, owner)
        finally:
            os.close(fd)
        for event in events:
            _put(event, board, owner)


def _put(source: Path, folder: Path, owner: os.stat_result) -> None:
    scratch = folder / f".{source.name}.part"
    try:
        with os.fdopen(safefile.create(scratch), "wb") as file:
            _give(file.fileno(), owner)
            file.write(source.read_bytes())
        scratch.replace(folder / source.name)
    finally:
        scratch.unlink(missing_ok=True)


def _give(fd: int, owner: os.stat_result) -> None:
    if os.fstat(fd).st_uid != owner.st_uid:
        os.fchown(fd, owner.st_uid, owner.st_gid)


def as_text(line: dict[str, Any]) -> str:
    """An evaluation for a reader: ``iteration 20: loss 1.234567``."""
    if "loss" not in line:
        return f"iteration {line['iteration']}: samples"
    loss = "not a finite number" if line["loss"] is None else f"{line['loss']:.6f}"
    return f"iteration {line['iteration']}: loss {loss}"

"""Megatron's checkpoints as models of ``transformers``, so that one engine runs both.

Read in one process, whatever parallelism they were written with, and without Megatron: the shards by PyTorch's own
reader, the flags of the training by an unpickler that makes no objects but plain ones.
"""

from __future__ import annotations

import io
import pickle
import re
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, FileSystemReader, load

from megatron.fill.errors import TaskError

LATEST = "latest_checkpointed_iteration.txt"
_PLAIN = {("argparse", "Namespace"), ("builtins", "complex"), ("builtins", "set"), ("collections", "OrderedDict")}


class IncompleteCheckpoint(TaskError):
    """A checkpoint is not there, or not yet, or not any more."""


class _Inert:
    """In place of an object of any other class: what it would do is not done."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> _Inert:
        return self


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(module, name) if (module, name) in _PLAIN else _Inert

    def persistent_load(self, key: Any) -> Any:
        return _Inert()


_INERT = SimpleNamespace(Unpickler=_Unpickler, load=pickle.load, __name__="inert")


class _Planner(DefaultLoadPlanner):
    """Reads what is not a tensor, without making its objects."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = _read_inert(value)


def _read_inert(file: io.BytesIO | Path) -> Any:
    return torch.load(file, "cpu", _INERT, weights_only=False)


def checkpoints(folder: Path) -> dict[int, Path]:
    """The complete checkpoints of a training's ``--save`` folder, by iteration, in order."""
    found = {}
    for path in folder.glob("iter_*"):
        match = re.fullmatch(r"iter_(\d+)", path.name)
        if match and (path / ".metadata").is_file():
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def is_checkpoint(folder: Path) -> bool:
    """True for a ``--save`` folder, or one checkpoint of it."""
    return (folder / LATEST).is_file() or (folder / ".metadata").is_file()


def latest(folder: Path) -> Path:
    """The newest complete checkpoint of a ``--save`` folder; a checkpoint itself is that one.

    Raises:
        IncompleteCheckpoint: there is none.
    """
    if (folder / ".metadata").is_file():
        return folder
    found = checkpoints(folder)
    if not found:
        raise IncompleteCheckpoint(f"{folder} has no complete checkpoint: expected iter_N/.metadata in it")
    return list(found.values())[-1]


def read_checkpoint(path: Path, weights: bool = True) -> tuple[Namespace, dict[str, torch.Tensor]]:
    """The training's arguments, and the model's weights by their names in Megatron, or none of them.

    Raises:
        IncompleteCheckpoint: some of it is not there.
        TaskError: it is something else.
    """
    try:
        reader = FileSystemReader(path)
        entries = reader.read_metadata().state_dict_metadata
        wanted: dict[str, Any] = {}
        for name, entry in entries.items():
            if hasattr(entry, "size") and name.startswith(("embedding.", "decoder.", "output_layer.")):
                if not weights:
                    continue
                wanted[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
            elif name.startswith("common_state/"):
                wanted[name] = None
        load(wanted, storage_reader=reader, planner=_Planner(), no_dist=True)
        common = next((value for name, value in wanted.items() if name.startswith("common_state/")), None)
        if common is None:  # older ones have a file for it
            common = _read_inert(path / "common.pt")
    except OSError as error:
        raise IncompleteCheckpoint(f"checkpoint {path}: {error}") from error
    except (Exception, CheckpointException) as error:  # the reader's own, which is no Exception
        if not (path / ".metadata").is_file() or "FileNotFoundError" in str(error):
            raise IncompleteCheckpoint(f"checkpoint {path} is not all there") from error
        raise TaskError(f"checkpoint {path} cannot be read: {type(error).__name__}: {error}") from error
    common = common[0] if isinstance(common, list | tuple) else common
    args = common.get("args") if isinstance(common, dict) else None
    if not isinstance(args, Namespace):
        raise TaskError(f"checkpoint {path} has no arguments of a training: expected one that Megatron wrote")
    return args, {name: tensor for name, tensor in wanted.items() if isinstance(tensor, torch.Tensor)}


def load_megatron(path: Path) -> tuple[Any, Namespace]:
    """The model of a checkpoint in host memory, as one of ``transformers``, and the training's arguments.

    Raises:
        IncompleteCheckpoint: it is not all there.
        TaskError: no model of ``transformers`` is like it.
    """
    from megatron.fill.wings.llm.megatron_weights import converted

    args, weights = read_checkpoint(latest(path))
    return converted(args, weights), args

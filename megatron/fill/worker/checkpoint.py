"""Checkpoints of a task: written atomically, verified by a checksum, and loaded without running code from them.

A job's folder holds the newest checkpoint and the one before it.  A file has the format of ``torch.save``, or JSON if
that represents the state exactly (importing torch takes seconds and half a GiB), followed by its SHA-256, since PyTorch
loads a flipped bit without an error.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.fill import untrusted
from megatron.fill.errors import TaskError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("pipefill.checkpoint")

NAME, PREVIOUS = "checkpoint.pt", "checkpoint-previous.pt"
_MARK = b"PIPEFILL-SHA256:"
_TRAILER_BYTES = len(_MARK) + hashlib.sha256().digest_size
_BLOCK = 1 << 20
_SMALL_BYTES = 1 << 12  # an array with fewer is no file of its own in the archive
_CAN_HOLD = "tensors, NumPy arrays, numbers, strings, and lists, tuples, sets and mappings of them"


def save(directory: Path, state: dict[str, Any]) -> None:
    """Write ``state`` to the job's folder, and keep the checkpoint before it; on an error, both earlier ones stay.

    Raises:
        OSError: it cannot be written.
        TaskError: it could not be loaded again, and so is not written.
    """
    scratch = directory / (NAME + ".part")
    try:
        with scratch.open("w+b") as file:
            _write(file, state)
            size = file.seek(0, os.SEEK_END)
            file.write(_MARK + _digest(file, size))
            file.flush()
            os.fsync(file.fileno())
        if (directory / NAME).exists():
            os.replace(directory / NAME, directory / PREVIOUS)
        os.replace(scratch, directory / NAME)
        folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)  # without which the renames do not survive a power cut
        finally:
            os.close(folder)
    finally:
        scratch.unlink(missing_ok=True)


def load(directory: Path) -> dict[str, Any] | None:
    """Return the newest undamaged state; None if none was saved, TaskError if all are damaged.

    A damaged file is renamed (``.corrupt``), and the one before it is used.
    """
    damaged = []
    for name in (NAME, PREVIOUS):
        path = directory / name
        if not path.exists():
            continue
        try:
            return _load(path)
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            aside = path.with_suffix(".corrupt")
            os.replace(path, aside)
            damaged.append(f"{aside} ({reason})")
            logger.warning("checkpoint %s cannot be used and is kept as %s: %s", path, aside, reason)
    if damaged:
        raise TaskError(f"no checkpoint can be loaded: {'; '.join(damaged)}; remove them to begin again")
    return None


def exists(directory: Path) -> bool:
    return any((directory / name).exists() for name in (NAME, PREVIOUS))


def discard(directory: Path) -> None:
    for name in (NAME, PREVIOUS):
        (directory / name).unlink(missing_ok=True)


def _write(file: Any, state: dict[str, Any]) -> None:
    text = _as_json(state)
    if text is not None:
        file.write(text)
        return
    import torch

    checksums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)  # loading does not check them
    try:
        torch.save(state, file, _Pickling)
    except RuntimeError as error:  # PyTorch's writer says "unexpected pos" for a full disk
        raise OSError(f"{file.name} cannot be written: {' '.join(str(error).split())[:200]}") from error
    finally:
        torch.serialization.set_crc32_options(checksums)
    if refused := _refused(file):
        raise TaskError(f"state_dict() returned a state with {refused}, which cannot be saved; expected {_CAN_HOLD}")


class _Pickling:
    """The part of Python's ``pickle`` that ``torch.save`` uses, with arrays and scalars of NumPy saved as data."""

    class Pickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            import numpy as np

            is_scalar = isinstance(value, np.generic)
            if not is_scalar and type(value) is not np.ndarray:
                return NotImplemented
            if value.dtype.hasobject:
                raise TaskError(f"state_dict() returned an array of {value.dtype}, which cannot be saved")
            if is_scalar:
                return _scalar, (np.lib.format.dtype_to_descr(value.dtype), value.tobytes())
            file = io.BytesIO()
            np.lib.format.write_array(file, value, allow_pickle=False)
            data = file.getbuffer()
            if len(data) < _SMALL_BYTES:
                return _array, (bytes(data),)
            import torch

            return _array, (torch.frombuffer(data, dtype=torch.uint8),)


def _scalar(dtype: Any, data: bytes) -> Any:
    """Return the scalar of NumPy that was saved; of our functions, a checkpoint may call this and ``_array`` only."""
    import numpy as np

    return np.ndarray((), np.lib.format.descr_to_dtype(dtype), data).copy()[()]


def _array(data: bytes | torch.Tensor) -> Any:
    """Return the array of NumPy that was saved."""
    import numpy as np

    return np.lib.format.read_array(io.BytesIO(data if isinstance(data, bytes) else data.numpy()), allow_pickle=False)


def _refused(file: Any) -> str:
    """Return the names of what is in the file and would not be loaded; empty if there is nothing of that kind.

    This reads the names in the archive's pickle and no tensor or large array, which lie beside it: loading all of it
    again would take as long as saving, and as much memory as the state has.
    """
    import torch

    file.seek(0)
    with torch.serialization.safe_globals([_scalar, _array]):
        try:
            names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        except pickle.UnpicklingError as error:  # a number of more than 255 bytes, say
            return f"what torch.load does not read ({error})"
    return ", ".join(sorted(name.removeprefix("builtins.") for name in names))


def _as_json(state: dict[str, Any]) -> bytes | None:
    """Return the state as JSON, or None if reading that would not give exactly the same state."""
    try:
        text = json.dumps(state)
    except (TypeError, ValueError):
        return None
    return text.encode() if repr(json.loads(text)) == repr(state) else None


def _load(path: Path) -> dict[str, Any]:
    with untrusted.open_plain(path) as file:  # opening a pipe of that name would block forever
        size = file.seek(0, os.SEEK_END) - _TRAILER_BYTES
        file.seek(max(0, size))
        trailer = file.read()
        if not trailer.startswith(_MARK):
            raise ValueError("it is cut short, or no checkpoint")
        if _digest(file, size) != trailer[len(_MARK) :]:
            raise ValueError("its checksum is wrong")
        file.seek(0)
        is_json = file.read(1) == b"{"
        file.seek(0)
        if is_json:
            return json.loads(file.read(size))
        import torch

        if refused := _refused(file):  # torch's own message begins with how to load the file nevertheless
            raise ValueError(f"it holds {refused}; expected {_CAN_HOLD}")
        file.seek(0)
        with torch.serialization.safe_globals([_scalar, _array]):
            state = torch.load(file, weights_only=True)
    if not isinstance(state, dict):
        raise ValueError(f"it holds a {type(state).__name__}; expected a dict")
    return state


def _digest(file: Any, size: int) -> bytes:
    """Return the SHA-256 of the first ``size`` bytes, and stop behind them."""
    file.seek(0)
    digest = hashlib.sha256()
    while size > 0 and (block := file.read(min(_BLOCK, size))):
        digest.update(block)
        size -= len(block)
    return digest.digest()

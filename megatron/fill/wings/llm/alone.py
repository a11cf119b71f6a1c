"""A batch without a training: this process answers a file of requests on this machine's device."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from megatron.fill.device.meter import free_bytes
from megatron.fill.errors import ConfigError
from megatron.fill.sidetask.base import TaskContext
from megatron.fill.wings.llm.batch import BatchJob
from megatron.fill.wings.llm.fitting import claimed_bytes

_SHARE = 0.8  # of the memory that is free now, without --memory


def partial_path(output: Path, args: Mapping[str, Any], requests: bytes) -> Path:
    """The file of answers until all are there: another one for other requests, models or arguments."""
    digest = sha256(requests + repr(sorted(args.items())).encode()).hexdigest()[:8]
    return output.with_name(f"{output.name}.{digest}.partial")


def answer_alone(
    args: Mapping[str, Any],
    output: Path,
    partial: Path,
    device: str,
    memory_bytes: int | None,
    progress: Callable[[int, int, float], None],
) -> tuple[int, int, float]:
    """Answer all requests, at full speed; what an earlier process has left in ``partial`` is not answered again.

    Args:
        args: arguments of ``BatchJob``, without ``output``.
        output: becomes the file of answers when all are there.
        memory_bytes: limit for models, passes, keys and values; None for four fifths of the free memory.
        progress: called with the number of answered requests, and this process's tokens and seconds.

    Returns:
        The requests that an earlier process had answered, and this process's tokens and seconds, without loading.

    Raises:
        ConfigError: another process does the same, or ``output`` is there.
        FillError: a model cannot be loaded or used.
        OSError: a file cannot be written.
    """
    with _locked(partial, output) as fd, tempfile.TemporaryDirectory(prefix="pipefill-batch-") as folder:
        if memory_bytes is None:
            memory_bytes = claimed_bytes(device) + int(_SHARE * free_bytes(device))
        task = BatchJob()
        task.context = TaskContext(output.name, Path(folder), device, memory_bytes)
        try:
            task.create(**args, output=str(partial.resolve()), pieces=1)
            task.configure(task.configurations()[0])
            task.init()
            before, begun = task.answered, time.perf_counter()
            try:
                while True:
                    task.run_next_step()
                    if task.next_node == 0:
                        progress(task.answered, task.generated, time.perf_counter() - begun)
            except StopIteration:
                pass
            run = before, task.generated, time.perf_counter() - begun
        finally:
            task.stop()
        os.fsync(fd)
        partial.replace(output)
    return run


@contextmanager
def _locked(partial: Path, output: Path) -> Iterator[int]:
    """The partial file, which is this process's meanwhile; it goes again if nothing came of it."""
    fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{partial} is being written by another pipefill batch; expected only one") from None
        try:
            if output.exists():
                raise ConfigError(f"{output} is there already: expected another --output, or that you remove it")
            yield fd
        finally:
            if not os.fstat(fd).st_size:
                partial.unlink(missing_ok=True)
    finally:
        os.close(fd)

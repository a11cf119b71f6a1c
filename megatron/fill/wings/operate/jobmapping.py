"""The files from which dcgm-exporter labels a GPU's metrics by job (``--hpc-job-mapping-dir``).

A file is named after a GPU's index and has the jobs on it, one a line.  Others may write there too, such as a batch
system's prolog: their lines stay.  A file without a line hides its GPU from the exporter's older versions, and a line
that is there twice has them answer with an error, so neither is ever left.

An agent that is killed leaves its lines.  Each agent holds a lock beside its GPU's file (``.pipefill-N``, which the
exporter passes over), and the kernel frees it however the agent ends; the node's other agents, or the next one of any
GPU, then remove the lines.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from megatron.fill.agent.context import Attendant
from megatron.fill.device.nvml import Gpu
from megatron.fill.device.port import DeviceError
from megatron.fill.linux.files import replacing

logger = logging.getLogger("pipefill.agent")

_LOCK_S = 0.5
_OURS = "pipefill-"  # how our lines begin
_HELD = ".pipefill-{}"  # the file that the agents of a GPU hold a shared lock on


class JobMapping(Attendant):
    """The lines of one agent's jobs in the file of its GPU; for any thread.

    Lines of ours that an earlier agent left, because it was killed, are removed at once, on the node's other GPUs too.
    An agent that shares the GPU puts its own back with ``keep``.

    Args:
        path: the GPU's file, in a folder that exists.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._jobs: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._failed = False
        self._held: int | None = None  # the descriptor of the lock, which no child inherits
        self._update(_is_ours, others_too=True)

    @contextlib.contextmanager
    def shown(self, job: str) -> Iterator[None]:
        """Have the job's line in the file meanwhile."""
        line = _OURS + job
        with self._lock:
            self._jobs[line] += 1
        self.keep()
        try:
            yield
        finally:
            with self._lock:
                self._jobs -= Counter([line])
            self._update(lambda other: other == line)

    def keep(self) -> None:
        """Put our lines back where they are missing, and remove those that killed agents have left on this node."""
        self._update(lambda _: False, others_too=True)

    def _update(self, goes: Callable[[str], bool], others_too: bool = False) -> None:
        """Write the file without the lines that go, and with those of our jobs; remove it if none is left."""
        try:
            with self._lock, _locked(self._path.parent):
                if self._held is None:
                    self._held = _hold(self._path)
                _write(self._path, goes, self._jobs)
                for path in self._path.parent.iterdir() if others_too else ():
                    if path.name.isdigit() and path.name != self._path.name and _left(path):
                        _write(path, _is_ours, ())
            self._failed = False
        except OSError as error:
            if not self._failed:  # once, not every few seconds
                logger.warning("%s does not show which jobs run on this GPU: %s", self._path, error)
            self._failed = True


def _is_ours(line: str) -> bool:
    return line.startswith(_OURS)


def _write(path: Path, goes: Callable[[str], bool], jobs: Iterable[str]) -> None:
    """Write a GPU's file without the lines that go, and with those of the jobs; remove it if none is left."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not goes(line.strip())]
    new = "".join(f"{line}\n" for line in dict.fromkeys([*lines, *jobs]))
    if new and new != text:
        with replacing(path) as temporary:
            temporary.write_text(new, encoding="utf-8")
            temporary.chmod(0o644)  # the exporter is another user's
    elif not new:
        path.unlink(missing_ok=True)


def _hold(path: Path) -> int:
    """Return a descriptor with the lock of a living agent of the GPU."""
    fd = os.open(path.parent / _HELD.format(path.name), os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # looks of ``_left`` are under the folder's lock, as this is
    except BaseException:
        os.close(fd)
        raise
    return fd


def _left(path: Path) -> bool:
    """True if an agent has been on the GPU, and none is now."""
    try:
        fd = os.open(path.parent / _HELD.format(path.name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def open_mapping(directory: str | None, uuid: str | None, gpus: Callable[[], Sequence[Gpu]]) -> JobMapping | None:
    """Return the mapping of a GPU in dcgm-exporter's folder; None if nobody asks for one, on a CPU (no UUID), and on a
    MIG slice, which has no index."""
    if directory is None or uuid is None:
        return None
    try:
        index = next((gpu.index for gpu in gpus() if gpu.uuid == uuid), None)
    except DeviceError as error:  # perhaps of another GPU of the node
        logger.warning("%s does not show which jobs run on %s: %s", directory, uuid, error)
        return None
    if index is None:
        logger.warning("%s does not show which jobs run on %s, which has no index", directory, uuid)
        return None
    return JobMapping(Path(directory) / str(index))


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Keep the agents of this node from changing the files at the same time.

    OSError if others hold the lock for too long; whoever reads the folder can.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        end_s = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end_s:
                    raise
            time.sleep(0.01)
        yield
    finally:
        os.close(fd)

"""What the kernel is to keep one job in."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from megatron.fill.errors import ConfigError

# The walls that ``Cage.without`` can name.
LEFT_OUT = ("proc", "landlock", "system calls", "run folder", "uncounted memory")


@dataclass(frozen=True, slots=True)
class Bind:
    """A place outside of its own folder that a job may use.

    Attributes:
        writable: it may write there too.
    """

    path: str
    writable: bool = False


def parse_bind(text: str) -> Bind:
    """Read ``PATH`` or ``PATH:rw``.

    Raises:
        ConfigError: it is neither, or there is no such place.
    """
    path, colon, mode = text.rpartition(":")
    if mode != "rw" or not colon:
        path, mode = (path, mode) if colon and mode == "ro" else (text, "")
    place = Path(path)
    if not place.is_absolute():
        raise ConfigError(f"--fill-bind {text}: expected an absolute path, or one and :rw")
    if not place.exists():
        raise ConfigError(f"--fill-bind {text}: there is no {place}")
    if mode == "rw" and place.resolve() == Path("/"):
        raise ConfigError(f"--fill-bind {text}: expected a folder for the jobs, not the whole machine")
    return Bind(str(place.resolve()), mode == "rw")


@dataclass(frozen=True, slots=True)
class Cage:
    """One job's.

    Attributes:
        namespaces: of those in ``probe.NAMESPACES``: the ones that this machine gives us.
        directory: the job's own folder, which it may write.
        binds: places that it may use besides.
        runs: run folders: what is in them is hidden but for its own folder, and for what ``binds`` names.
        masked: files that it may not even open to read, wherever they lie: who reads one can lock it too.
        user: whom it runs as, by number; None to stay who we are.
        group: the user's.
        network: it shares the machine's network.
        memory_files_bytes: the most that its files in memory (``/tmp``, ``/dev/shm``) may take.
        devices: files of ``/dev`` that it may use besides the harmless ones.
        host_memory_files: the machine's ``/dev/shm`` instead of one of its own: an MPS client needs that.
        real_time: it keeps the power to choose its scheduling class; for the emulated device only.
        without: walls of ``LEFT_OUT`` that are not built, by name: with one left out, what it alone refuses has to
            succeed, or a test of it shows nothing.  No setting of a training leads here.

    Raises:
        ValueError: there is no wall of such a name.
    """

    namespaces: tuple[str, ...] = ()
    directory: str = "/"
    binds: tuple[Bind, ...] = field(default=())
    runs: tuple[str, ...] = ()
    masked: tuple[str, ...] = ()
    user: int | None = None
    group: int | None = None
    network: bool = False
    memory_files_bytes: int = 1 << 30
    devices: tuple[str, ...] = ()
    host_memory_files: bool = False
    real_time: bool = False
    without: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if unknown := set(self.without).difference(LEFT_OUT):
            raise ValueError(f"walls {sorted(unknown)} cannot be left out: expected some of {LEFT_OUT}")

    @property
    def writable(self) -> list[str]:
        """All folders outside of ``/tmp`` and ``/dev`` that it may write."""
        return [self.directory, *(bind.path for bind in self.binds if bind.writable)]

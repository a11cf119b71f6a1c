"""The configuration of a job's sandbox."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron.fill.errors import ConfigError

# The sandbox layers that ``Sandbox.without`` can name.
LEFT_OUT = ("proc", "landlock", "system calls", "run folder", "uncounted memory")


@dataclass(frozen=True, slots=True)
class Bind:
    """A file or folder outside of its own folder that a job may use, by its absolute path."""

    path: str
    writable: bool = False


def parse_bind(text: str) -> Bind:
    """Parse ``PATH``, ``PATH:ro`` or ``PATH:rw``.

    Raises:
        ConfigError: the path is not absolute or does not exist, or it is ``/:rw``.
    """
    writable = text.endswith(":rw")
    place = Path(text.removesuffix(":rw" if writable else ":ro"))
    if not place.is_absolute():
        raise ConfigError(f"--fill-bind {text}: expected an absolute path, or one and :rw")
    if not place.exists():
        raise ConfigError(f"--fill-bind {text}: there is no {place}")
    if writable and place.resolve() == Path("/"):
        raise ConfigError(f"--fill-bind {text}: expected a folder for the jobs, not the whole machine")
    return Bind(str(place.resolve()), writable)


@dataclass(frozen=True, slots=True)
class Sandbox:
    """The sandbox of a job; ValueError if ``without`` names an unknown layer."""

    namespaces: tuple[str, ...] = ()  # namespaces to create, of ``enter.NAMESPACES``
    directory: str = "/"  # the job's own folder, which it may write
    binds: tuple[Bind, ...] = ()
    runs: tuple[str, ...] = ()  # run folders, whose content is hidden except for its own folder and ``binds``
    masked: tuple[str, ...] = ()  # files that it may not even open to read, since a reader can also lock them
    user: int | None = None  # user ID that it runs as; None for this process's user
    group: int | None = None
    network: bool = False  # True if it shares the machine's network
    memory_files_bytes: int = 1 << 30  # limit for its files in memory (``/tmp``, ``/dev/shm``)
    devices: tuple[str, ...] = ()  # files in ``/dev`` that it may use in addition to the harmless ones
    host_memory_files: bool = False  # True for the machine's ``/dev/shm``, not its own, which an MPS client requires
    # Layers of ``LEFT_OUT`` that are not set up.  With a layer left out, an attack that only this layer refuses must
    # succeed, or a test of the layer proves nothing.  No setting of a training sets this.
    without: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if unknown := set(self.without).difference(LEFT_OUT):
            raise ValueError(f"layers {sorted(unknown)} cannot be left out: expected some of {LEFT_OUT}")

    @property
    def writable(self) -> list[str]:
        """The folders outside of ``/tmp`` and ``/dev`` that the job may write."""
        return [self.directory, *(bind.path for bind in self.binds if bind.writable)]

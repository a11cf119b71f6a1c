"""Options and arguments that several commands share."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, CallbackParam, Option

from megatron.fill.device.meter import default_device
from megatron.fill.errors import ConfigError, FillError
from megatron.fill.store import JobStore, open_store

_STORE = "PIPEFILL_STORE"
_COMPLETED = 500


@contextmanager
def opened(where: str | None, create: bool = False) -> Iterator[JobStore]:
    """Open the store that ``--store`` names, and close it at the end; ConfigError if none was given."""
    if not where:
        raise ConfigError(f"no job store given; expected --store URL, FILE or FOLDER, or {_STORE} in the environment")
    with closing(open_store(where, create=create)) as store:
        yield store


def checked_device(name: str | None) -> str:
    """Return the device of ``--device``, or else a GPU if there is one, or the CPU; ConfigError if it is not there."""
    from megatron.fill.device.nvml import Nvml, uuid_of
    from megatron.fill.device.port import DeviceError

    where = default_device() if name is None else name
    if where == "cpu":
        return where
    if not re.fullmatch(r"cuda:\d+", where):
        raise ConfigError(f"--device is {where!r}: expected cpu or cuda:0")
    try:
        uuid_of(where, os.environ.get("CUDA_VISIBLE_DEVICES") or None, Nvml().gpus())
    except DeviceError as error:
        raise ConfigError(f"--device is {where!r}, which is not there: {error}; expected cpu or a device") from error
    return where


def parsed[T](option: str, text: str, parse: Callable[[str], T]) -> T:
    """Return the value of an option; a ValueError of ``parse`` says what was expected, and becomes a ConfigError."""
    from megatron.fill.given.problems import shown

    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"{option} is {shown(text)}: {error}") from None


def check_writable(**paths: Path | None) -> None:
    """Raise ConfigError, before the work begins, if the file of an option could not be written; creates its folder."""
    for option, path in paths.items():
        if path is None:
            continue
        if option == "png" and path.suffix.lower() not in ("", ".png"):
            raise ConfigError(f"--png is {path}: expected a name that ends in .png, which is all that is drawn")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if (there := path.exists()) and not path.is_dir() and _is_device(path):  # a rename would replace it
                raise ConfigError(f"--{option} {path}: is a device, a pipe or a link of /dev; expected a file")
            with path.open("ab"):
                pass
            if not there:
                path.unlink()
        except OSError as error:
            raise ConfigError(f"--{option} {path}: cannot be written: {error.strerror}; expected a file") from error


def _is_device(path: Path) -> bool:
    folder = path.parent.resolve()
    return not path.is_file() or folder == Path("/dev") or folder.is_relative_to("/proc")


def _names(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the names and states of jobs for completion in a shell; empty if the store cannot be read."""
    try:
        with opened(ctx.params.get("store") or os.environ.get(_STORE)) as store:
            found = {job.name: str(job.state) for job in store.list(limit=_COMPLETED)}
    except FillError:
        return []
    return [(name, state) for name, state in found.items() if name.startswith(incomplete)]


def _warn_of_password(ctx: typer.Context, parameter: CallbackParam, value: str | None) -> str | None:
    """Warn if a store's password was given on the command line; return the URL unchanged."""
    source = ctx.get_parameter_source(str(parameter.name))
    if value is None or "://" not in value or source is None or source.name != "COMMANDLINE":
        return value
    from megatron.fill.store.location import WHERE_PASSWORDS_GO, has_password, shown

    if has_password(value):
        seen = f"the password of --store {shown(value)} is in ps for all users to see"
        typer.echo(f"pipefill: {seen}; expected it {WHERE_PASSWORDS_GO}", err=True)
    return value


def store_option(text: str, envvar: str | None = _STORE) -> Any:
    """Return the option ``--store`` with this help, and the environment variable that stands in for it."""
    names, metavar = ("--store", "-s"), "URL|FILE|FOLDER"
    return Option(*names, envvar=envvar, metavar=metavar, callback=_warn_of_password, help=text)


Store = Annotated[str | None, store_option("The job store: a database URL, a database file, or a run folder.")]
Json = Annotated[bool, Option("--json", help="Print JSON, and nothing else.")]
Device = Annotated[
    str | None, Option("--device", metavar="DEVICE", help="cpu or cuda:0 (default: a GPU if there is one).")
]
JobName = Annotated[
    str, Argument(metavar="JOB", help="Its name (the latest of that name) or number.", autocompletion=_names)
]
JobNames = Annotated[
    list[str], Argument(metavar="JOB...", help="Names (the latest of each) or numbers.", autocompletion=_names)
]

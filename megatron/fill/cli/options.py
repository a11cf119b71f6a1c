"""The options and arguments that several commands share."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from megatron.fill.errors import ConfigError, FillError
from megatron.fill.store import JobStore, open_store

_STORE = "PIPEFILL_STORE"
_COMPLETED = 500


@contextmanager
def opened(where: str | None, create: bool = False) -> Iterator[JobStore]:
    """The store that ``--store`` names.

    Raises:
        ConfigError: it was not given.
        StoreError: it cannot be opened.
    """
    if not where:
        raise ConfigError(f"no job store given; expected --store URL, FILE or FOLDER, or {_STORE} in the environment")
    store = open_store(where, create=create)
    try:
        yield store
    finally:
        store.close()


def checked_device(name: str | None) -> str:
    """The device that ``--device`` names, if this machine has it.

    Raises:
        ConfigError: it is none, or is not there.
    """
    from megatron.fill.device import DeviceError
    from megatron.fill.device.meter import default_device
    from megatron.fill.device.nvml import Nvml, uuid_of

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


def _names(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """The names of jobs for the shell to complete; none where the store cannot be read."""
    try:
        with opened(ctx.params.get("store") or os.environ.get(_STORE)) as store:
            found = {job.name: str(job.state) for job in store.list(limit=_COMPLETED)}
    except FillError:
        return []
    return [(name, state) for name, state in found.items() if name.startswith(incomplete)]


Store = Annotated[
    str | None,
    typer.Option(
        "--store",
        "-s",
        envvar=_STORE,
        metavar="URL|FILE|FOLDER",
        help="The job store: a database URL, a database file, or a run folder.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")]
Device = Annotated[
    str | None, typer.Option("--device", metavar="DEVICE", help="cpu or cuda:0 (default: a GPU if there is one).")
]
JobName = Annotated[
    str, typer.Argument(metavar="JOB", help="Its name (the latest of that name) or number.", autocompletion=_names)
]
JobNames = Annotated[
    list[str], typer.Argument(metavar="JOB...", help="Names (the latest of each) or numbers.", autocompletion=_names)
]

"""The folder and the job store of a run: their locations, and checks that this run may use them."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from megatron.fill import untrusted
from megatron.fill.config import FillSettings
from megatron.fill.errors import ConfigError
from megatron.fill.folders import AGENTS, CONTROL, JOBS, PARTS, PRIVATE, RECORDS
from megatron.fill.store.filesystem import network_file_system
from megatron.fill.store.location import ENVIRONMENT as STORE
from megatron.fill.store.location import WHERE_PASSWORDS_GO, database_file, has_password, locate, shown

_SQLITE = b"SQLite format 3\0"  # the beginning of its databases


def store_of(settings: FillSettings, run_dir: Path) -> str:
    """Return the URL or path of the run's job store."""
    return settings.store or os.environ.get(STORE) or str(run_dir.resolve())


def served(settings: FillSettings, run_dir: Path) -> str:
    """Return the line that names the store that a run serves, and where its name comes from."""
    variable = f"${STORE}" if os.environ.get(STORE) else "the run folder's own"
    origin = "--fill-store" if settings.store else variable
    store = store_of(settings, run_dir)
    file = database_file(store)
    shared = network_file_system(file) if file is not None else ""
    warning = f"; it is on {shared}: submit from this machine only, or use PostgreSQL" if shared else ""
    if file is not None and not _may_be_database(file):
        warning += f"; NO JOB CAN BE HAD FROM IT: {file} is no SQLite database"
    elif file is not None and not _may_write(file.resolve()):
        warning += f"; NO JOB CAN BE HAD FROM IT: this user may not write {file} and its folder"
    return f"PipeFill: serves the job store {shown(store)} ({origin}){warning}"


def say_if_away(store: str) -> None:
    """Print a line if the store's server cannot be used now: the agents go on trying, and only their logs say so."""
    from megatron.fill.store.sql import why_away

    if why := why_away(store):
        print(f"PipeFill: that job store cannot be used now, and no job runs until it can: {why}", flush=True)


def _may_be_database(file: Path) -> bool:
    """True unless the file has contents that do not begin as a database of SQLite does."""
    try:
        with untrusted.open_plain(file) as opened:
            return opened.read(len(_SQLITE)) in (_SQLITE, b"")
    except OSError:  # none yet, or none that can be read now
        return True


def _may_write(file: Path) -> bool:
    """True if this user may write a database and beside it, or make it."""
    there = next(path for path in (file, *file.parents) if os.access(path, os.F_OK))
    needed = (file, file.parent) if there == file else (there,)
    return all(os.access(path, os.W_OK) for path in needed)


def check_store(settings: FillSettings, run_dir: Path | None) -> None:
    """Raise ConfigError if this run may not serve its store, StoreError if that is not the address of one."""
    where = store_of(settings, run_dir or Path("runs"))
    nodes = int(os.environ.get("GROUP_WORLD_SIZE") or os.environ.get("SLURM_NNODES") or 1)
    if locate(where).drivername == "sqlite" and nodes > 1:
        raise ConfigError(
            f"{nodes} nodes cannot share the job store {where}; expected --fill-store postgresql+psycopg://..."
        )
    # Megatron writes its flags to its output, to TensorBoard and into every checkpoint.
    if settings.store is not None and has_password(settings.store):
        raise ConfigError(
            f"--fill-store {shown(settings.store)}: its password would be in ps, in the training's output, and in its "
            f"checkpoints; expected it {WHERE_PASSWORDS_GO}"
        )
    if settings.store is None and os.environ.get(STORE):
        _check_owner(where, run_dir)


def _check_owner(where: str, run_dir: Path | None) -> None:
    """Raise ConfigError if a relative ``$PIPEFILL_STORE``, perhaps forgotten, leads to the store of another run."""
    path = where.removeprefix("sqlite:///")
    if "://" in path or Path(path).expanduser().is_absolute():
        return
    folder = Path(str(locate(where).database)).parent
    of_a_run = all((folder / part).is_dir() for part in (RECORDS, AGENTS, JOBS))
    if of_a_run and (run_dir is None or run_dir.resolve() != folder.resolve()):
        raise ConfigError(
            f"{STORE} is {where!r}, the store of another run than this one, whose jobs this training would serve; "
            f"expected --fill-store {where} with it to do so on purpose, or {STORE} unset"
        )


def new_run_folder() -> str:
    """Return the default run folder; it is the same for a SLURM job after a requeue."""
    job, step = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_STEP_ID", "0")
    if job is not None:
        return f"runs/pipefill-{job}" if step == "0" else f"runs/pipefill-{job}.{step}"
    return time.strftime("runs/pipefill-%Y%m%d-%H%M%S-") + str(os.getpid())


def make_run_folder(run_dir: Path, seen: bool = False) -> None:
    """Make the run folder (``RunSandbox.seen``), without status files that an earlier start of the training left."""
    for part in PARTS:
        (run_dir / part).mkdir(parents=True, exist_ok=True)
    for part in set(PARTS) - {JOBS} if seen else PRIVATE:
        (run_dir / part).chmod(0o700)
    if seen:  # with umask 0, a job could put a folder of its own in the place of one of them
        for folder in (run_dir, run_dir / JOBS):
            folder.chmod(folder.stat().st_mode & ~0o022)
    for stale in (run_dir / AGENTS).glob("*.json"):
        stale.unlink()
    for stale in (run_dir / CONTROL).iterdir():
        shutil.rmtree(stale, ignore_errors=True)

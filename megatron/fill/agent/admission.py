"""Admission of jobs: the user, the environment, and the list of jobs that may run."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from megatron.fill.errors import ConfigError
from megatron.fill.linux.host import may_become
from megatron.fill.sandbox.config import Bind, Sandbox
from megatron.fill.sandbox.view import may_enter
from megatron.fill.store.values import Job
from megatron.fill.work import Work

COMMAND = "command"  # stands for every command in the list of allowed jobs
_VARIABLE = "env:"  # prefix of the patterns for variables there
_NOBODY = 65534

# Nothing else is passed on: the rest may be tokens, passwords, or the addresses of Megatron's process group.
_KEPT = {
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR"),
    *("PYTHONPATH", "PYTHONHOME", "PYTHONHASHSEED", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH"),
    *("CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"),
    *("NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"),
    *("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_OFFLINE", "TORCH_HOME"),
}
LIBRARY_SETTINGS = {
    "OMP_NUM_THREADS": "1",  # one thread per library on the rank's core
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # Keep memory that a step has freed for the next one: getting it from the kernel page by page takes bubble time.
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
}


@dataclass(frozen=True, slots=True)
class JobUser:
    """The user that jobs run as."""

    name: str
    uid: int
    gid: int
    home: str


def find_user(name: str) -> JobUser:
    """Return the user with this name (or number), to run jobs as.

    Raises:
        ConfigError: there is no such user, it is root, or this process may not change to it.
    """
    try:
        entry = pwd.getpwuid(int(name)) if name.isdecimal() else pwd.getpwnam(name)
    except KeyError:
        raise ConfigError(f"the setting user is {name!r}: there is no such user") from None
    if entry.pw_uid == 0:
        raise ConfigError(f"the setting user is {name!r}, which is root; expected a user with fewer rights")
    if os.geteuid() not in (0, entry.pw_uid):
        raise ConfigError(f"the setting user is {name!r}: only root can run jobs as another user")
    return JobUser(entry.pw_name, entry.pw_uid, entry.pw_gid, entry.pw_dir)


def default_user() -> JobUser | None:
    """Return the default user for jobs: ``nobody`` if this process is root and can become it, otherwise None."""
    if os.geteuid() != 0:
        return None
    try:
        user = find_user("nobody")
    except ConfigError:  # a container without a list of users
        user = JobUser("nobody", _NOBODY, _NOBODY, "/nonexistent")
    return user if may_become(user.uid, user.gid) else None


def job_sandbox(
    user: JobUser | None,
    namespaces: Sequence[str],
    directory: Path,
    network: bool,
    binds: Sequence[Bind] = (),
    mps_pipe: str | None = None,
) -> Sandbox:
    """Return the sandbox of a job of this user with its own folder; more may be hidden from it, or given to it."""
    mps = () if mps_pipe is None else (Bind(mps_pipe, writable=True),)
    return Sandbox(
        namespaces=tuple(namespaces),
        directory=str(directory),
        binds=(*binds, *mps),
        user=None if user is None else user.uid,
        group=None if user is None else user.gid,
        network=network,
        host_memory_files=mps_pipe is not None,
    )


def check_reach(user: JobUser, place: Path) -> None:
    """Raise ConfigError if the user may not enter a folder on a path that its jobs need: run folder, interpreter."""
    place = place.resolve()
    for part in [*reversed(place.parents), place]:
        if part.exists() and not may_enter(part, user.uid, user.gid):
            raise ConfigError(f"user {user.name} cannot enter {part}, and so cannot use {place}")


def environment(
    host: Mapping[str, str], device: Mapping[str, str], user: JobUser | None, directory: Path
) -> dict[str, str]:
    """Return the environment that a worker is started with; the job's own variables are set later, in its sandbox.

    Args:
        host: the agent's environment, of which only ``_KEPT`` is passed on.
        device: variables that the worker's device needs.
        directory: HOME of a user without a home folder.
    """
    kept = {name: value for name, value in host.items() if name in _KEPT or name.startswith("LC_")}
    if user is not None:
        home = user.home if Path(user.home).is_dir() else str(directory)
        kept |= {"HOME": home, "USER": user.name, "LOGNAME": user.name}
    return kept | LIBRARY_SETTINGS | dict(device)


def job_variables(job: Job, run: str, directory: Path) -> dict[str, str]:
    """Return the variables ``PIPEFILL_*`` that describe a job to itself; zero bytes are removed."""
    index, count = job.work.instance
    values = {"JOB": job.name, "JOB_ID": job.id, "INDEX": index, "COUNT": count, "ATTEMPT": job.attempt}
    values |= {"RUN": run, "DIRECTORY": directory}
    return {f"PIPEFILL_{name}": str(value).replace("\0", "") for name, value in values.items()}


def refusal(work: Work, allowed: Sequence[str]) -> str:
    """Return the reason why a job may not run here; empty if it may.

    Args:
        allowed: patterns (``fnmatch``) of ``module:Class``, the word ``command``, and ``env:PATTERN`` for the variables
            that a task may set, since many variables decide which code runs.  An empty list allows everything.
    """
    if not allowed:
        return ""
    patterns = ", ".join(allowed)
    if work.task is None:
        return "" if COMMAND in allowed else f"commands are not allowed here; the setting allow has {patterns}"
    if not any(fnmatchcase(work.task, pattern) for pattern in allowed):
        return f"{work.task} is not allowed here; the setting allow has {patterns}"
    for name in work.env:
        if not any(fnmatchcase(f"{_VARIABLE}{name}", pattern) for pattern in allowed if pattern.startswith(_VARIABLE)):
            return f"variable {name} is not allowed here; the setting allow has {patterns}, and not {_VARIABLE}{name}"
    return ""

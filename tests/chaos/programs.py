"""The names of the programs of a run in command lines, taken from the modules themselves."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from types import ModuleType

from megatron.fill import agent, worker


@cache
def agent_program() -> str:
    """The module that a rank's agent is started as."""
    return _module(agent, "agent")


@cache
def warden_program() -> str:
    """The module that the warden of an agent is started as."""
    return _module(agent, "warden")


@cache
def worker_program() -> str:
    """The module that a job's first process is started as."""
    return _module(worker, "worker")


def _module(room: ModuleType, name: str) -> str:
    """The module's full name.

    Raises:
        ModuleNotFoundError: it was renamed, and a search for it would find no process.
    """
    spec = find_spec(f"{room.__name__}.{name}")
    if spec is None:
        raise ModuleNotFoundError(f"{room.__name__} has no {name}")
    return spec.name

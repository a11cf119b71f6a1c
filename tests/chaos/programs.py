"""The programs of a run by the names that their command lines have, taken from the modules themselves."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from types import ModuleType

from megatron.fill import agent, worker


@cache
def agent_program() -> str:
    """As which a rank's agent is started."""
    return _module(agent, "agent")


@cache
def warden_program() -> str:
    """As which what guards the agent is started."""
    return _module(agent, "warden")


@cache
def worker_program() -> str:
    """As which a job's first process is started."""
    return _module(worker, "worker")


def _module(room: ModuleType, name: str) -> str:
    """The module's full name.

    Raises:
        ModuleNotFoundError: it was renamed, and whoever looks for it would find nobody.
    """
    spec = find_spec(f"{room.__name__}.{name}")
    if spec is None:
        raise ModuleNotFoundError(f"{room.__name__} has no {name}")
    return spec.name

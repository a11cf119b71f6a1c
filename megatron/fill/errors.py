"""The errors that a user can cause.  Each message says what was wrong, where, and what was expected."""

from __future__ import annotations

import os
import sys
import time
from typing import NoReturn

RANK_0_S = 10.0  # how long other ranks wait for rank 0 to say what is wrong


class FillError(Exception):
    """The root of PipeFill's own errors."""


class ConfigError(FillError):
    """A jobs file or a ``--fill-*`` flag has a wrong value."""


class PatchError(FillError):
    """A patch does not fit the installed package."""


class TaskError(FillError):
    """A side task cannot be loaded or broke the contract of ``SideTask``."""


class StaleProfile(TaskError):
    """A task has changed since it was measured."""


class GateError(FillError):
    """A gate's shared memory is not what this version reads."""


class StoreError(FillError):
    """The job store cannot be reached, or is not what this version reads."""


class JobError(FillError):
    """There is no such job, or it is in no state for what was asked."""


class PlanError(FillError):
    """A job fits no bubble; the message says which node is too long or too large for which bubble, and by how much."""


class GraphError(FillError):
    """A model's graph or a plan for it is not valid, or no plan fits the devices."""


class ControlError(FillError):
    """A run cannot be controlled from here, or its control page is not what this version reads."""


class SandboxError(FillError):
    """The walls around a job cannot be built as they were asked for."""


class RunTaken(FillError):
    """The run folder belongs to another training that goes on; this one must not start."""


class NetworkError(FillError):
    """The network between ranks cannot be measured."""


def exit_saying(error: str) -> NoReturn:
    """End this rank with status 2; rank 0 says why.

    The launcher ends all ranks when the first one has failed, so the others wait: else rank 0 might be ended before it
    has said anything.  One that is still there then has an error of its own, and says it.
    """
    if os.environ.get("RANK", "0") != "0":
        time.sleep(RANK_0_S)
    print(error, file=sys.stderr, flush=True)
    sys.exit(2)

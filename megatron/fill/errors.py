"""Errors that a user can cause.  Each message has the place, the value found, and what was expected."""

from __future__ import annotations

import os
import sys
import time
from typing import NoReturn

RANK_0_S = 10.0  # seconds that other ranks wait for rank 0 to print its error


class FillError(Exception):
    """The root of PipeFill's own errors."""


class ConfigError(FillError):
    """A jobs file or a ``--fill-*`` flag has a wrong value."""


class PatchError(FillError):
    """A patch does not fit the installed package."""


class TaskError(FillError):
    """A side task cannot be loaded, or broke the contract of ``SideTask``."""


class StaleProfile(TaskError):
    """A task has changed since it was measured."""


class GateError(FillError):
    """A gate's shared memory is not in the format of this version."""


class StoreError(FillError):
    """The job store cannot be reached, or is not in the format of this version."""


class JobError(FillError):
    """A job does not exist, or its state does not allow the operation."""


class PlanError(FillError):
    """A job fits no bubble; the message names the node that is too long or too large, the bubble, and the excess."""


class GraphError(FillError):
    """A model's graph or a plan for it is not valid, or no plan fits the devices."""


class ControlError(FillError):
    """A run cannot be controlled from here, or its control page is not in the format of this version."""


class SandboxError(FillError):
    """A job's sandbox cannot be built as requested."""


class RunTaken(FillError):
    """The run folder belongs to another training that is still running; this one must not start."""


class NetworkError(FillError):
    """The network between ranks cannot be measured."""


def exit_saying(error: str) -> NoReturn:
    """End this rank with status 2; rank 0 prints the error.

    The launcher ends all ranks when the first one has failed, so the other ranks wait for rank 0 to have printed
    it.  A rank that is still running then has its own error, and prints it.
    """
    if os.environ.get("RANK", "0") != "0":
        time.sleep(RANK_0_S)
    print(error, file=sys.stderr, flush=True)
    sys.exit(2)

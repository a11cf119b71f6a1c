"""The jobs' user and sandbox on this machine, determined the same way for a training and for ``pipefill doctor``."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron.fill.agent.admission import JobUser, check_reach, default_user, find_user, job_sandbox
from megatron.fill.device.cuda import device_nodes
from megatron.fill.errors import ConfigError
from megatron.fill.sandbox.driver import DriverTrial, why_no_cuda
from megatron.fill.sandbox.probe import SandboxSupport, look

_MPS = "MPS serves one user only: jobs run as the training's, and read what it can read"
_NOT_ROOT = (
    "the training is not root's, so jobs run as its own user and read what it can read; expected the training as root, "
    "or user in --fill-settings with its own user to accept that"
)
_NOBODY_ELSE = (
    "root has no other user in this user namespace, so jobs run as the training's and read what it can read; "
    "expected a container that maps the user nobody"
)


def find_support(
    named: str | None = None, mps: bool = False, network: bool = False, places: Sequence[Path] = (Path("runs"),)
) -> tuple[JobUser | None, SandboxSupport]:
    """Return the user that jobs run as (None for the training's) and the layers of their sandbox.

    Args:
        named: the requested user (``user`` of the settings); the training's own user means no separation by user.
        places: paths that the jobs' user must be able to reach, besides the interpreter.

    Raises:
        ConfigError: there is no such user, or the requested one cannot reach a path.
        SandboxError: the layers cannot be determined.
    """
    own = named is not None and find_user(named).uid == os.geteuid()
    user = None if own else find_user(named) if named is not None else None if mps else default_user()
    support = _look(user, None if own else _MPS if mps else _NOT_ROOT if os.geteuid() else _NOBODY_ELSE, network)
    if user is None or "mount" in support.namespaces:
        return user, support
    # Without a mount namespace, the user needs the rights to enter every folder on the path.
    try:
        for place in (*places, Path(sys.executable)):
            check_reach(user, place)
    except ConfigError as error:
        if named is not None:
            raise
        return None, _look(None, f"{error} (chmod o+x helps): jobs run as the training's user", network)
    return user, support


def _look(user: JobUser | None, why_same_user: str | None, network: bool) -> SandboxSupport:
    return look(None, None, why_same_user, network) if user is None else look(user.uid, user.gid, "", network)


def why_no_cuda_for_jobs(
    user: JobUser | None, namespaces: Sequence[str], network: bool = False, mps_pipe: str | None = None
) -> str:
    """Return the reason why a sandboxed job cannot use this node's GPUs, by a trial; empty if it can."""
    with tempfile.TemporaryDirectory(prefix="pipefill-cuda-") as folder:
        if user is not None:
            os.chown(folder, user.uid, user.gid)
        sandbox = job_sandbox(user, namespaces, Path(folder), network, mps_pipe=mps_pipe)
        return why_no_cuda(DriverTrial(replace(sandbox, devices=device_nodes(""))))

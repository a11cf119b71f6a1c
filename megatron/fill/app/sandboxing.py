"""The sandbox for this run's jobs on this node, determined before the training starts."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.fill.agent.admission import JobUser, find_user
from megatron.fill.agent.sandbox import find_support, why_no_cuda_for_jobs
from megatron.fill.config import FillSettings
from megatron.fill.device.mps import MpsDaemon
from megatron.fill.errors import ConfigError
from megatron.fill.sandbox.config import Bind, parse_bind
from megatron.fill.sandbox.probe import Layer
from megatron.fill.sandbox.view import may_enter


@dataclass(frozen=True, slots=True)
class RunSandbox:
    user: JobUser | None = None  # user that the jobs run as; None for the training's user
    namespaces: tuple[str, ...] = ()  # namespaces that this machine provides (``Sandbox``)
    binds: tuple[Bind, ...] = ()  # paths that jobs may use besides their own folders
    layers: tuple[Layer, ...] = ()  # all layers, each with what it lacks here

    @property
    def seen(self) -> bool:
        """True if jobs run as another user without a mount namespace, so that only file modes restrict them."""
        return self.user is not None and "mount" not in self.namespaces


def check_flags(settings: FillSettings) -> None:
    """Raise ConfigError if a flag names a user or path that does not exist."""
    if settings.user is not None:
        find_user(settings.user)
    for text in settings.bind:
        parse_bind(text)
    mapping = settings.dcgm_job_mapping
    if mapping is not None and not os.access(mapping, os.W_OK | os.X_OK):
        raise ConfigError(f"--fill-settings, dcgm_job_mapping: {mapping}: expected a folder that can be written")


def find_sandbox(
    settings: FillSettings, mps: MpsDaemon | None, modules: Sequence[str] = (), on_gpu: bool = False
) -> RunSandbox:
    """Determine the sandbox that this machine provides, and print what it lacks.

    With ``on_gpu``, the first rank of each node tries to use a GPU in it.  The jobs' own modules are imported from the
    folders ``modules``.  ConfigError if a flag is wrong; or, with ``strict``, if a layer is missing or no job can use a
    GPU.
    """
    binds = tuple(parse_bind(text) for text in settings.bind)
    user, support = find_support(settings.user, mps is not None, settings.network, [Path(settings.report or "runs")])
    lacking = "; ".join(f"{layer.name}: {layer.lacks}" for layer in support.lacking)
    if lacking and settings.strict:
        raise ConfigError(f"strict is set: this machine cannot keep jobs in as well as it should: {lacking}")
    if lacking:
        _say(f"jobs are kept in less well here (pipefill doctor says more): {lacking}")
    if on_gpu and os.environ.get("LOCAL_RANK", "0") == "0":
        pipe = None if mps is None else str(mps.pipe)
        why = why_no_cuda_for_jobs(user, support.namespaces, settings.network, pipe)
        if why and settings.strict:
            raise ConfigError(f"strict is set: on {socket.gethostname()} no job can use a GPU: {why}")
        if why:
            print(f"PipeFill: on {socket.gethostname()} no job can use a GPU: {why}", flush=True)
    for folder in modules:
        if user is not None and not may_enter(Path(folder), user.uid, user.gid):
            _say(f"jobs run as {user.name}, who may not enter {folder}: a module there is not found (chmod o+rx helps)")
    return RunSandbox(user, support.namespaces, binds, support.layers)


def _say(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"PipeFill: {text}", flush=True)

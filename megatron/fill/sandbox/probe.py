"""The sandbox layers that this machine supports, found by setting up sandboxes with more and more of them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace

from megatron.fill.errors import SandboxError
from megatron.fill.linux import host
from megatron.fill.linux.isolated import ask
from megatron.fill.sandbox.config import Sandbox
from megatron.fill.sandbox.enter import NAMESPACES
from megatron.fill.sandbox.process import SandboxedProcess
from megatron.fill.sandbox.remedy import remedy
from megatron.fill.spec import Spec

_LOOK_S = 60.0  # timeout for a busy machine
LAYERS = {  # layer and purpose of each namespace
    "pid": ("processes", "no process outside can be named"),
    "mount": ("files", "files are read-only but for the job's own folder; no files of other jobs, sockets or devices"),
    "ipc": ("ipc", "shared memory of System V and message queues of its own"),
    "cgroup": ("control groups", "control groups cannot be named"),
    "net": ("network", "no network but its own localhost"),
}
_GIVEN_UP = (  # layer, purpose, and a word of the reason if the layer is missing
    ("system calls", "those that reach beyond a job are refused (seccomp)", "system call"),
    ("landlock", "a second layer around files, signals and tracing", "landlock"),
    ("powers", "no capability of root's", "powers"),
    ("privileges", "nothing gains privileges by being started", "privileges"),
)


@dataclass(frozen=True, slots=True)
class Layer:
    """A sandbox layer."""

    name: str
    keeps: str  # effect of the layer
    lacks: str = ""  # reason why it is missing here; empty if it is not


@dataclass(frozen=True, slots=True)
class SandboxSupport(Spec):
    """The sandbox layers of this machine."""

    namespaces: tuple[str, ...]  # supported ones, for ``Sandbox.namespaces``
    layers: tuple[Layer, ...]  # all layers, including missing ones

    @property
    def lacking(self) -> list[Layer]:
        """The layers that are missing here."""
        return [layer for layer in self.layers if layer.lacks]


def look(user: int | None, group: int | None, why_same_user: str | None = "", network: bool = False) -> SandboxSupport:
    """Try every layer, in a separate process, since this one may have threads and must keep its powers.

    Args:
        user: user ID that the jobs run as; None, also for ``group``, for that of this process.
        group: group ID that the jobs run as.
        why_same_user: reason why jobs do not run as a user without rights; empty if they do, None to leave out the
            layer ``user``.
        network: True if the jobs share the machine's network, which leaves out the layer ``network``.

    Raises:
        SandboxError: the trial failed.
    """
    asked = json.dumps([user, group, why_same_user, network])
    try:
        return SandboxSupport.from_json(ask("megatron.fill.sandbox.probe", asked, _LOOK_S))
    except (OSError, ValueError) as error:  # something else may print, too
        raise SandboxError(f"what this machine has for keeping jobs in cannot be found out: {error}") from None


def main(asked: str) -> None:
    """Run the trial, in the process that ``look`` starts, and print the result."""
    print(probe(*json.loads(asked)).to_json())


def probe(user: int | None, group: int | None, why_same_user: str | None, network: bool) -> SandboxSupport:
    """Try every layer, as ``look`` does, from this process, which must have a single thread."""
    host.adopt_orphans()
    sandbox = Sandbox(directory="/usr", user=user, group=group, network=network)  # nothing is written there
    given, reasons = _namespaces(sandbox)
    layers = [
        _layer(layer, keeps, reasons.get(name, ""))
        for name, (layer, keeps) in LAYERS.items()
        if not (network and name == "net")
    ]
    if why_same_user is not None:
        layers.append(Layer("user", "a user without rights over the training", why_same_user))
    lacking, error = _try(replace(sandbox, namespaces=given))
    for name, keeps, word in _GIVEN_UP:
        layers.append(_layer(name, keeps, next((reason for reason in lacking if word in reason), error)))
    return SandboxSupport(given, tuple(layers))


def _layer(name: str, keeps: str, lacks: str) -> Layer:
    if lacks and name == "files":
        lacks += ": jobs see each other's folders, and whatever their user can read"
    if lacks and (what := remedy(name, lacks)):
        lacks += f"; expected {what}"
    return Layer(name, keeps, lacks)


def _namespaces(sandbox: Sandbox) -> tuple[tuple[str, ...], dict[str, str]]:
    """The namespaces that can be created together, and the reasons why the others cannot."""
    base: tuple[str, ...] = () if os.geteuid() == 0 else ("user",)
    given = base
    reasons: dict[str, str] = {}
    for name in ("mount", "pid", "ipc", "cgroup", "net"):
        if name == "pid" and "mount" not in given:  # it needs its own /proc
            reasons[name] = "it needs a mount namespace"
        elif name != "net" or not sandbox.network:
            wanted = tuple(one for one in NAMESPACES if one in (*given, name))
            _, error = _try(replace(sandbox, namespaces=wanted))
            if error:
                reasons[name] = error
            else:
                given = wanted
    return () if given == base else given, reasons


def _try(sandbox: Sandbox) -> tuple[list[str], str]:
    """Set a sandbox up; return the reasons for layers that it lacks, and the error if it cannot be set up at all."""
    try:
        held = SandboxedProcess(sandbox, lambda: None, lambda: None)
    except SandboxError as error:
        return [], str(error)
    held.kill()
    return held.lacking, ""

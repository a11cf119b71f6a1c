"""The sandbox layers that this machine supports, found by trying each in a short-lived child."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from megatron.fill.errors import SandboxError
from megatron.fill.linux.isolated import ask
from megatron.fill.sandbox.config import Sandbox
from megatron.fill.sandbox.enter import NAMESPACES, give_everything_up, open_inner, open_outer
from megatron.fill.sandbox.remedy import remedy
from megatron.fill.spec import Spec

_READ_BYTES = 4096
_LOOK_S = 60.0  # timeout for a busy machine
_NAMESPACES = {  # layer and purpose of each
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
    """A sandbox layer.

    Attributes:
        keeps: effect of the layer.
        lacks: reason why the layer is missing here; empty if it is not.
    """

    name: str
    keeps: str
    lacks: str = ""


@dataclass(frozen=True, slots=True)
class SandboxSupport(Spec):
    """The sandbox layers of this machine.

    Attributes:
        namespaces: supported namespaces, for ``Sandbox.namespaces``.
        layers: all layers, including missing ones.
    """

    namespaces: tuple[str, ...]
    layers: tuple[Layer, ...]

    @property
    def lacking(self) -> list[Layer]:
        """The layers that are missing here."""
        return [layer for layer in self.layers if layer.lacks]


def look(user: int | None, group: int | None, why_same_user: str | None = "", network: bool = False) -> SandboxSupport:
    """Try every layer, in a separate process, since this one may have threads and must keep its powers.

    Args:
        user: user ID that the jobs run as; None for that of this process.
        group: group ID that the jobs run as; None for that of this process.
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
    base = () if os.geteuid() == 0 else ("user",)
    with _folder() as folder:
        sandbox = Sandbox(directory=folder, user=user, group=group, network=network)
        given, reasons = _namespaces(sandbox, base)
        shown = {name: layer for name, layer in _NAMESPACES.items() if not (network and name == "net")}
        layers = [_layer(layer, keeps, reasons.get(name, "")) for name, (layer, keeps) in shown.items()]
        lacking = _try(lambda: give_everything_up(replace(sandbox, namespaces=given)))
    if why_same_user is not None:
        layers.append(Layer("user", "a user without rights over the training", why_same_user))
    # A reason that names no layer comes from an error before all layers were set up.
    raised = next((reason for reason in lacking if not any(word in reason for _, _, word in _GIVEN_UP)), "")
    for name, keeps, word in _GIVEN_UP:
        layers.append(_layer(name, keeps, next((reason for reason in lacking if word in reason), raised)))
    return SandboxSupport(given, tuple(layers))


def _layer(name: str, keeps: str, lacks: str) -> Layer:
    if lacks and name == "files":
        lacks += ": jobs see each other's folders, and whatever their user can read"
    if lacks and (what := remedy(name, lacks)):
        lacks += f"; expected {what}"
    return Layer(name, keeps, lacks)


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """Yield a folder like a job's own; ``/usr`` if none can be created, since nothing is written to it."""
    with contextlib.ExitStack() as always:
        try:
            folder = always.enter_context(tempfile.TemporaryDirectory(prefix="pipefill-probe-"))
            os.chmod(folder, 0o755)
        except OSError:
            folder = "/usr"
        yield folder


def _namespaces(sandbox: Sandbox, base: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """The namespaces that can be created together, and the reasons why the others cannot."""
    given = list(base)
    reasons: dict[str, str] = {}
    for name in ("mount", "pid", "ipc", "cgroup", "net"):
        if name == "pid" and "mount" not in given:  # it needs its own /proc
            reasons[name] = "it needs a mount namespace"
            continue
        if name == "net" and sandbox.network:
            continue
        trial = replace(sandbox, namespaces=_ordered([*given, name]))
        failures = _try(partial(_enter, trial))
        if failures:
            reasons[name] = failures[0]
        else:
            given.append(name)
    return (() if given == list(base) else _ordered(given)), reasons


def _ordered(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in NAMESPACES if name in names)


def _enter(sandbox: Sandbox) -> list[str]:
    open_outer(sandbox)

    def inside() -> list[str]:
        open_inner(sandbox)
        return []

    return _try(inside)


def _try(act: Callable[[], list[str]]) -> list[str]:
    """Call ``act`` in a child of this process; return its result, or the error it raised as a list of one."""
    read_fd, write_fd = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            found = act()
        except BaseException as error:
            found = [str(error) or type(error).__name__]
        os.write(write_fd, "\0".join(found).encode()[:_READ_BYTES])
        os._exit(0)
    os.close(write_fd)
    told = b""
    while data := os.read(read_fd, _READ_BYTES):
        told += data
    os.close(read_fd)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        return [f"the attempt ended with {code}"]
    return [text for text in told.decode(errors="replace").split("\0") if text]

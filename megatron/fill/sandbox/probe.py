"""What this machine gives us to keep a job in, found out by trying it in children that end at once."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

from megatron.fill.errors import SandboxError
from megatron.fill.linux.isolated import program
from megatron.fill.sandbox.cage import Cage
from megatron.fill.sandbox.enter import NAMESPACES, give_everything_up, open_inner, open_outer
from megatron.fill.sandbox.remedy import remedy

_READ_BYTES = 4096
_LOOK_S = 60.0  # on a machine that is busy
_KEEPS = {
    "pid": "no process outside can be named",
    "mount": "files are read-only but for the job's own folder; no files of other jobs, sockets or devices",
    "ipc": "shared memory of System V and message queues of its own",
    "cgroup": "control groups cannot be named",
    "net": "no network but its own localhost",
    "user": "root's powers for the walls only",
}
_GIVEN_UP = (  # and a word in the reason why it is not there
    ("system calls", "those that reach beyond a job are refused (seccomp)", "system call"),
    ("landlock", "a second wall around files, signals and tracing", "landlock"),
    ("powers", "no capability of root's", "powers"),
    ("privileges", "nothing gains privileges by being started", "privileges"),
)
_LAYERS = {"pid": "processes", "mount": "files", "ipc": "ipc", "cgroup": "control groups", "net": "network"}


@dataclass(frozen=True, slots=True)
class Layer:
    """One wall.

    Attributes:
        keeps: what it does where it stands.
        lacks: why it does not stand here; empty where it does.
    """

    name: str
    keeps: str
    lacks: str = ""


@dataclass(frozen=True, slots=True)
class Walls:
    """All of them, as far as this machine gives them.

    Attributes:
        namespaces: for ``Cage.namespaces``.
    """

    namespaces: tuple[str, ...]
    layers: tuple[Layer, ...]

    @property
    def lacking(self) -> list[Layer]:
        """Those that do not stand here."""
        return [layer for layer in self.layers if layer.lacks]


def look(user: int | None, group: int | None, why_same_user: str | None = "", network: bool = False) -> Walls:
    """Try every wall, in a process of its own: this one may have threads, and is to lose nothing.

    Args:
        user, group: whom the jobs are to run as; None to stay who we are.
        why_same_user: why they do not run as a user without rights; empty where they do, None if nobody asks for that.
        network: the jobs share the machine's network, so that wall is not asked for.

    Raises:
        SandboxError: it cannot be found out.
    """
    asked = json.dumps([user, group, why_same_user, network])
    done = subprocess.run(
        program("megatron.fill.sandbox.probe", asked),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_LOOK_S,
        check=False,
    )
    try:
        found = json.loads(done.stdout)
    except ValueError:
        said = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise SandboxError(f"what this machine has for keeping jobs in cannot be found out: {said}") from None
    return Walls(tuple(found["namespaces"]), tuple(Layer(**layer) for layer in found["layers"]))


def main(asked: str) -> None:
    """What ``look`` runs."""
    print(json.dumps(asdict(probe(*json.loads(asked)))))


def probe(user: int | None, group: int | None, why_same_user: str | None, network: bool) -> Walls:
    """``look`` in this process, which must have one thread only."""
    base = () if os.geteuid() == 0 else ("user",)
    with _folder() as folder:
        cage = Cage(directory=folder, user=user, group=group, network=network)
        given, reasons = _namespaces(cage, base)
        layers = [_layer(_LAYERS[name], _KEEPS[name], reasons.get(name, "")) for name in _LAYERS]
        if network:
            layers = [layer for layer in layers if layer.name != "network"]
        lacking = _try(lambda: give_everything_up(replace(cage, namespaces=given)))
    if why_same_user is not None:
        layers.append(Layer("user", "a user without rights over the training", why_same_user))
    # What names none of them was raised before they were all there.
    raised = next((reason for reason in lacking if not any(word in reason for _, _, word in _GIVEN_UP)), "")
    for name, keeps, word in _GIVEN_UP:
        layers.append(_layer(name, keeps, next((reason for reason in lacking if word in reason), raised)))
    return Walls(given, tuple(layers))


def _layer(name: str, keeps: str, lacks: str) -> Layer:
    if lacks and name == "files":
        lacks += ": jobs see each other's folders, and whatever their user can read"
    if lacks and (what := remedy(name, lacks)):
        lacks += f"; expected {what}"
    return Layer(name, keeps, lacks)


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """A folder such as a job's own; where none can be made, one that is there, since nothing is written in it."""
    with contextlib.ExitStack() as always:
        try:
            folder = always.enter_context(tempfile.TemporaryDirectory(prefix="pipefill-probe-"))
            os.chmod(folder, 0o755)
        except OSError:
            folder = "/usr"
        yield folder


def _namespaces(cage: Cage, base: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Those that can be had together, and why the others cannot."""
    given = list(base)
    reasons: dict[str, str] = {}
    for name in ("mount", "pid", "ipc", "cgroup", "net"):
        if name == "pid" and "mount" not in given:  # it needs a /proc of its own
            reasons[name] = "it needs a mount namespace"
            continue
        if name == "net" and cage.network:
            continue
        trial = replace(cage, namespaces=_ordered([*given, name]))
        failures = _try(partial(_enter, trial))
        if failures:
            reasons[name] = failures[0]
        else:
            given.append(name)
    return (() if given == list(base) else _ordered(given)), reasons


def _ordered(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in NAMESPACES if name in names)


def _enter(cage: Cage) -> list[str]:
    open_outer(cage)

    def inside() -> list[str]:
        open_inner(cage)
        return []

    return _try(inside)


def _try(act: Callable[[], list[str]]) -> list[str]:
    """What ``act`` returns in a child of this process, or what it raised there."""
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

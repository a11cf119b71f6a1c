"""A trial of CUDA in a job's sandbox, which finds the layer that prevents it from starting.

In ``cuInit`` a driver opens devices, libraries and files of ``/proc``, which ones depends on its version.  So the trial
calls it in a process with all layers, and if it fails, with all but one.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NoReturn

from megatron.fill.errors import SandboxError
from megatron.fill.linux import host
from megatron.fill.linux.isolated import ask
from megatron.fill.sandbox.config import Sandbox
from megatron.fill.sandbox.probe import LAYERS
from megatron.fill.sandbox.process import SandboxedProcess
from megatron.fill.spec import Spec

LIBRARY = "libcuda.so.1"
_LEFT_OUT = ("proc", "landlock", "system calls")  # layers of ``config.LEFT_OUT`` that can affect a driver
_LOOK_S = 120.0  # for all attempts, on a machine that is busy
_MOST_BYTES = 1000


@dataclass(frozen=True, slots=True)
class DriverTrial(Spec):
    """The input of a trial: a sandbox like that of a job on the GPU, and the name of the driver's library."""

    sandbox: Sandbox
    library: str = LIBRARY


def why_no_cuda(trial: DriverTrial) -> str:
    """The reason, in one line, why no job can use a GPU in this sandbox; empty if jobs can.  Tried in a child."""
    try:
        return ask("megatron.fill.sandbox.driver", trial.to_json(), _LOOK_S).strip()
    except TimeoutError:
        return f"cuInit does not return in the sandbox ({_LOOK_S:.0f} s were waited)"
    except OSError as error:
        return str(error)


def main(text: str) -> None:
    """Run a trial, in the process that ``why_no_cuda`` starts, and print the reason."""
    host.adopt_orphans()
    print(_judge(DriverTrial.from_json(text)))


def _judge(trial: DriverTrial) -> str:
    wrong = _behind(trial.sandbox, trial.library)
    if not wrong:
        return ""
    if _behind(None, trial.library):
        return f"{wrong}, and without a sandbox too"
    helps = [name for name, sandbox in _with_one_less(trial.sandbox) if not _behind(sandbox, trial.library)]
    if not helps:
        return f"{wrong} in the sandbox, and with any one of its layers left out; it starts without all of them"
    return f"{wrong} in the sandbox; it starts with this layer left out: {' or '.join(helps)}"


def _with_one_less(sandbox: Sandbox) -> Iterator[tuple[str, Sandbox]]:
    """Yield the sandbox without one of its layers, for each layer, with the name that ``pipefill doctor`` prints."""
    for name, (layer, _) in LAYERS.items():
        left_out = ("mount", "pid") if name == "mount" else (name,)
        if name in sandbox.namespaces:
            yield layer, replace(sandbox, namespaces=tuple(one for one in sandbox.namespaces if one not in left_out))
    for layer in _LEFT_OUT:
        yield layer, replace(sandbox, without=(layer,))
    if sandbox.user is not None:
        yield "user", replace(sandbox, user=None, group=None)


def _behind(sandbox: Sandbox | None, library: str) -> str:
    """The error of ``cuInit`` in this sandbox, or without one; empty if it succeeds."""
    told_r, told_w = os.pipe()

    def start() -> NoReturn:
        os.write(told_w, f"{_start(library)}\n".encode()[:_MOST_BYTES])
        os._exit(0)  # without the exit handlers that the driver has registered

    try:
        if sandbox is None:
            child = os.fork()
            if child == 0:
                start()
            os.waitpid(child, 0)
        else:
            held = SandboxedProcess(sandbox, lambda: None, start)
            held.begin()
            held.wait()
    except SandboxError as error:
        return str(error)
    finally:
        os.close(told_w)
        with os.fdopen(told_r, "rb") as answers:
            said = answers.read().decode(errors="replace")
    return said.strip() if said else "cuInit ends the process that calls it"


def _start(library: str) -> str:
    try:
        cuda = ctypes.CDLL(library)
        code = cuda.cuInit(0)
        if not code:
            return ""
        name = ctypes.c_char_p(b"unknown")
        cuda.cuGetErrorName(code, ctypes.byref(name))
        return f"cuInit gives {code} ({(name.value or b'unknown').decode(errors='replace')})"
    except (OSError, AttributeError) as error:
        return str(error)

"""A process that has imported what every rank imports, and forks Pythons: they start in a second instead of eight.

    python warm.py SOCKET [MODULE...]
    python warm.py --two SOCKET SOCKET

It serves one request per connection: a JSON line with ``argv``, ``cwd`` and ``env``, and ``terminal`` if the output is
one of its own; standard output, error and, if it has one, input as descriptors.  It answers with the pid of the new
process, which lives in the mount and network namespaces of the process that asks, and then with its exit code.  Of
Megatron it has imported what is named: nothing where the patches are to find it as fresh as in a process of their own.
With ``--two`` it forks another one for the second socket, with what every rank imports, that ends with it.
"""

from __future__ import annotations

import argparse
import array
import ast
import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import functools
import gc
import importlib
import inspect
import io
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
import types
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import NoReturn

HEAVY = (
    *("torch", "torch.distributed", "torch.utils.tensorboard", "torch.distributed.checkpoint", "torch._dynamo"),
    *("torch._inductor.compile_fx", "torch._dynamo.repro.after_dynamo", "networkx", "omegaconf", "wandb"),
    *("transformers.models.auto.tokenization_auto", "tensorboard", "numpy", "scipy", "pydantic", "sqlalchemy"),
    *("peft", "rich", "yaml", "matplotlib.figure", "matplotlib.backends.backend_agg", "torch.optim.optimizer"),
)
# Megatron, and what `pretrain_gpt.py` imports of PipeFill: nothing is patched by that.
RANK = (
    *("megatron.training", "megatron.fill.app.launch", "megatron.fill.report", "megatron.fill.store.sql", "tiktoken"),
    *("megatron.core.datasets.blended_megatron_dataset_builder", "megatron.core.tokenizers.text.models"),
    "megatron.core.models.mimo",
)
ORPHAN_S = 30.0
PR_SET_PDEATHSIG = 1
PR_SET_MM, PR_SET_MM_MAP = 35, 14
SHOWN: list[ctypes.Array[ctypes.c_char]] = []  # what the kernel shows of this process, kept in place
# In the environment of a rank:
REST = "PIPEFILL_TEST_REST_MS"  # what it sleeps after each optimizer step, if it has or may get jobs
MOUNTS = "PIPEFILL_TEST_MOUNTS"  # what it and its agent see in the place of some files and folders, as JSON


def serve(path: str, *modules: str, then: str = "") -> None:
    """Serve at ``path``, and with what every rank imports at ``then``, until this process is killed."""
    for name in (*HEAVY, *modules):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    draw()
    if then:
        if (other := os.fork()) == 0:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            serve(then, *RANK)
        signal.signal(signal.SIGTERM, lambda *_: leave(other))
    if "megatron.training" in sys.modules:
        parse()
        save()
        invent()
    keep()
    gc.freeze()  # else the first collection in a rank copies all of it
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{path}.new")
        listener.listen()
        os.rename(f"{path}.new", path)  # who finds it can connect
        while True:
            connection, _ = listener.accept()
            data, descriptors = receive(connection)
            if not data.endswith(b"\n"):  # who asked was killed in the middle of it
                for descriptor in (*descriptors, connection.detach()):
                    os.close(descriptor)
                continue
            pid = os.fork()
            if pid == 0:
                listener.close()
                become(json.loads(data), descriptors, connection)
            for descriptor in descriptors:
                os.close(descriptor)
            with contextlib.suppress(OSError):  # who asked may have been killed since
                connection.sendall(f"{pid}\n".encode())
            threading.Thread(target=report, args=(connection, pid), daemon=True).start()


def leave(other: int) -> NoReturn:
    """End with the other process, and wait for it: so the time that both took counts for who waits for this one."""
    os.kill(other, signal.SIGKILL)
    os.waitpid(other, 0)
    os._exit(0)


def draw() -> None:
    """Have matplotlib find and read its font, which takes it half a second."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure()
    figure.text(0, 0, "0")
    FigureCanvasAgg(figure).draw()


def parse() -> None:
    """Have the sources read that Megatron's parser takes its help texts from, which takes it as long."""
    from megatron.training.arguments import add_megatron_arguments

    inspect.getsource = functools.cache(inspect.getsource)  # type: ignore[assignment]
    ast.parse = functools.cache(ast.parse)  # type: ignore[assignment]
    add_megatron_arguments(argparse.ArgumentParser())


def save() -> None:
    """Have the process that collects the results of a save forked: spawned, it imports Megatron for six seconds."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async.get_write_results_queue = functools.partial(
        filesystem_async.get_write_results_queue, mp_mode="fork"
    )


def invent() -> None:
    """Have Megatron invent 3,000 sequences of mock data, and not 100,000 that every rank shuffles three times."""
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

    MockGPTLowLevelDataset.size = 3000


def keep() -> None:
    """Have no child take torch's operators apart at its end, 200 libraries of them."""
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        if (alive := finalizer.peek()) and alive[1].__module__ == "torch.library":
            finalizer.atexit = False


def receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    descriptors = array.array("i")
    data = b""
    with contextlib.suppress(ConnectionError):
        data, ancillary, _, _ = connection.recvmsg(1 << 20, socket.CMSG_SPACE(3 * descriptors.itemsize))
        for _, _, content in ancillary:
            descriptors.frombytes(content)
        while not data.endswith(b"\n") and (more := connection.recv(1 << 20)):
            data += more
    return data, list(descriptors)


def report(connection: socket.socket, pid: int) -> None:
    """Tell the launcher how the rank ended.  One whose launcher is gone and that does not end then is ended."""
    ended = os.pidfd_open(pid)
    select.select([connection.fileno(), ended], [], [])
    if not select.select([ended], [], [], ORPHAN_S)[0]:
        os.kill(pid, signal.SIGKILL)
    os.close(ended)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    connection.close()


def become(request: dict, descriptors: list[int], connection: socket.socket) -> None:
    """Turn this child into a Python that was started with these arguments."""
    try:
        join_namespaces(connection)
    except FileNotFoundError:  # who asked has ended since
        os._exit(1)
    connection.close()
    os.setsid()
    for number, descriptor in zip((1, 2, 0), descriptors, strict=False):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if request.get("terminal"):
        take_terminal()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[1:1] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", *sys.path)]
    show([sys.executable, *request["argv"]], request["env"])
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)
    faulthandler.enable()  # one that hangs is aborted to see where
    argv = request["argv"]
    if REST in os.environ and {"--fill-jobs", "--fill-store"} & set(argv):
        rest(float(os.environ[REST]) / 1e3)
    if MOUNTS in os.environ:
        mount(json.loads(os.environ[MOUNTS]))
    code = 0
    if argv[0] == "-u":
        argv = argv[1:]
    if argv[0] == "-W":
        warnings.simplefilter(argv[1])
        argv = argv[2:]
    try:
        if argv[0] == "-c":
            sys.path[0] = ""
            sys.argv = ["-c", *argv[2:]]
            main = types.ModuleType("__main__")
            sys.modules["__main__"] = main
            exec(compile(argv[1], "<string>", "exec"), vars(main))
        elif argv[0] == "-m":
            sys.path[0] = os.getcwd()
            sys.argv = argv[1:]
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(argv[0]))
            sys.argv = argv
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    end(code)


def take_terminal() -> None:
    """Make standard output the terminal of this session, and outlive its end."""
    fcntl.ioctl(1, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def join_namespaces(connection: socket.socket) -> None:
    """Enter the mount and network namespaces of the process that asked, where they are others.

    Raises:
        FileNotFoundError: it has ended.
    """
    asking, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    for path, kind in ((f"/proc/{asking}/ns/net", os.CLONE_NEWNET), (f"/proc/{asking}/ns/mnt", os.CLONE_NEWNS)):
        if os.stat(path).st_ino != os.stat(f"/proc/self/ns/{os.path.basename(path)}").st_ino:
            namespace = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            os.setns(namespace, kind)
            os.close(namespace)


def show(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Have ``/proc`` show this command line and this environment, as of a program that was started with them.

    A kernel without CONFIG_CHECKPOINT_RESTORE continues to show those of the process that was forked.
    """
    line = b"".join(os.fsencode(word) + b"\0" for word in words)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    SHOWN.append(ctypes.create_string_buffer(line + variables))
    begin = ctypes.addressof(SHOWN[-1])
    middle, end = begin + len(line), begin + len(line) + len(variables)
    with open("/proc/self/stat", "rb") as file:
        fields = [
            int(field) for field in file.read().rpartition(b")")[2].split()[1:]
        ]  # from the parent's pid, the 4th, on
    code, stack, data = fields[22:24], fields[24], fields[41:44]
    libc = ctypes.CDLL(None)
    libc.sbrk.restype = ctypes.c_void_p
    kept = (*code, *data, libc.sbrk(0), stack)
    layout = struct.pack("11QQII", *kept, begin, middle, middle, end, 0, 0, 0xFFFFFFFF)
    libc.prctl(PR_SET_MM, ctypes.c_ulong(PR_SET_MM_MAP), layout, ctypes.c_ulong(len(layout)), ctypes.c_ulong(0))


def mount(places: dict[str, str]) -> None:
    """Put one file or folder in the place of another, for this process and those that it starts."""
    os.unshare(os.CLONE_NEWNS)
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    for place, shown in places.items():
        subprocess.run(["mount", "--bind", shown, place], check=True)


def rest(seconds: float) -> None:
    """Sleep after each optimizer step: in this time others can start that else have the bubbles only."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(lambda *_: time.sleep(seconds))


def end(code: int) -> NoReturn:
    """End as Python does, but for taking all modules apart: in a forked process that takes seconds."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    if sys.argv[1] == "--two":
        serve(sys.argv[2], then=sys.argv[3])
    serve(*sys.argv[1:])

"""Trainings whose ranks are forked from this process, which has imported Megatron: they start in two seconds.

Each rank is pinned to no core, is in a session of its own, and dies with this process.  A training can be held and let
go on, so that two of them take turns on one machine.
"""

from __future__ import annotations

import atexit
import gc
import os
import runpy
import signal
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NoReturn

from megatron.fill.linux.libc import PR_SET_PDEATHSIG, prctl
from megatron.fill.linux.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
_OWN = {"OMP_NUM_THREADS": "1", "PIPEFILL_CPU_BACKEND": "1"}


class ForkedRanks:
    """Processes that run one Python program as the ranks of a launcher.

    Args:
        program: a script and its arguments, or ``-m``, a module, and its arguments.
        log: for the output of all of them.
        ranks: how many.
        environment: of each rank, beside the launcher's variables.
        core: which of the machine's cores the first of them takes.
    """

    def __init__(
        self,
        program: Sequence[str],
        log: Path,
        ranks: int,
        environment: Mapping[str, str] | None = None,
        core: int = 0,
    ) -> None:
        self.log = log
        log.touch()
        self._port = ExitStack()
        port = self._port.enter_context(free_port())
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
        shared |= {"LOCAL_WORLD_SIZE": str(ranks), **(environment or {})}
        self._pids = {}
        sys.stdout.flush()
        sys.stderr.flush()
        for rank in range(ranks):
            own = shared | {"RANK": str(rank), "LOCAL_RANK": str(core + rank)}
            pid = os.fork()
            if pid == 0:
                _become(program, log, own)
            self._pids[pid] = rank

    def hold(self) -> None:
        """Stop all of them where they are."""
        self._signal(signal.SIGSTOP)

    def let_go(self) -> None:
        """Have them go on."""
        self._signal(signal.SIGCONT)

    def ask_to_end(self) -> None:
        """As SLURM does; with ``--exit-signal-handler`` a training ends well after its iteration."""
        self.let_go()
        self._signal(signal.SIGTERM)

    def wait(self, within_s: float) -> None:
        """Until all have ended.

        Raises:
            RuntimeError: one failed, or they took too long; the message has the end of the output.
        """
        until_s = time.monotonic() + within_s
        while self._pids:
            self.check()
            if time.monotonic() > until_s:
                self.kill()
                raise RuntimeError(f"the ranks have not ended in {within_s:.0f} s:\n{self.tail()}")
            time.sleep(0.02)
        self._port.close()

    def check(self) -> bool:
        """Whether some still run.

        Raises:
            RuntimeError: one failed.
        """
        for pid in list(self._pids):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                rank, code = self._pids.pop(pid), os.waitstatus_to_exitcode(status)
                if code:
                    self.kill()
                    raise RuntimeError(f"rank {rank} failed with status {code}:\n{self.tail()}")
        return bool(self._pids)

    def wait_for(self, text: str, within_s: float) -> None:
        """Until the output has it.

        Raises:
            RuntimeError: it had not in time, or they ended before.
        """
        until_s = time.monotonic() + within_s
        while text not in self.log.read_text(encoding="utf-8", errors="replace"):
            if not self.check() or time.monotonic() > until_s:
                self.kill()
                raise RuntimeError(f"{text!r} was not said in {within_s:.0f} s:\n{self.tail()}")
            time.sleep(0.05)

    def tail(self) -> str:
        """The end of the output."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-3000:]

    def kill(self) -> None:
        """At once."""
        self._signal(signal.SIGKILL)
        for pid in self._pids:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
        self._pids.clear()
        self._port.close()

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.killpg(pid, number)


def preload() -> None:
    """Import here what every rank imports; only before the first rank is made."""
    os.environ.update(_OWN)
    import megatron.fill.device.before_cuda  # Megatron asks for CUDA while it is imported

    # isort: split
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about what is not installed, once per module
        import megatron.training  # noqa: F401
        import torch
        import torch.utils.tensorboard

    torch.set_num_threads(1)  # a fork has none of its parent's threads
    gc.collect()
    gc.freeze()  # else the first collection in a rank copies all of it


def _become(program: Sequence[str], log: Path, environment: Mapping[str, str]) -> NoReturn:
    """Turn this child into a rank."""
    code = 1
    try:
        atexit._clear()  # what is this process' parent's to do: it would remove the parent's temporary folders
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.environ.update(_OWN | dict(environment))
        os.chdir(ROOT)
        sys.path[0] = str(ROOT)
        code = _run(program)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _run(program: Sequence[str]) -> int:
    try:
        if program[0] == "-m":
            sys.argv = list(program[1:])
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(program)
            runpy.run_path(program[0], run_name="__main__")
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0

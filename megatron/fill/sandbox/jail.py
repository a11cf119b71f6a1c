"""A process behind the walls of its cage, as the process that put it there holds it.

Three processes: the caller, which stays outside and can be named by nobody inside; the *init*, the first process of the
process namespace, which runs no code of the job and takes all of it down with itself; and the job, a process group of
its own.  When the caller dies, the kernel ends the init, and with it everything in the namespace.

A fourth one lives for a moment: whoever opens a process namespace can start no thread from then on, so that is left to
a child of the caller, which bequeaths the init to it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from megatron.fill.errors import SandboxError
from megatron.fill.linux import peak
from megatron.fill.linux.libc import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, prctl
from megatron.fill.linux.state import state_in
from megatron.fill.sandbox import naming
from megatron.fill.sandbox.cage import Cage
from megatron.fill.sandbox.enter import give_everything_up, open_inner, open_outer
from megatron.fill.sandbox.powers import be_first_to_die, hide_memory
from megatron.fill.sandbox.seccomp import opening_calls

_READ_BYTES = 1 << 16


class Jail:
    """One job, which waits for ``let_go``.

    The caller must have one thread only, and must have adopted orphans (``host.adopt_orphans``).

    Args:
        prepare: called in the job's process before it gives everything up (limits, priority).
        body: what the job is; called once let go, with nothing left to give up.  Its process ends with it.

    Attributes:
        init: the first process inside, by its number outside.
        pid: the job, by its number outside; it is also that of its process group.
        lacking: what this machine could not do to keep it in.

    Raises:
        SandboxError: the walls cannot be built; nothing is left.
    """

    def __init__(self, cage: Cage, prepare: Callable[[], None], body: Callable[[], None]) -> None:
        self._cage = cage
        self._prepare = prepare
        self._body = body
        self.init = 0
        self._exit_code: int | None = None
        self._lock = threading.Lock()  # whoever asks first reaps
        alive_r, self._alive_w = os.pipe()  # its end says that we have died
        self._told_r, told_w = os.pipe()
        go_r, self._go_w = os.pipe()
        opener = os.fork()
        if opener == 0:
            for fd in (self._alive_w, self._told_r, self._go_w):
                os.close(fd)
            self._run_opener(alive_r, told_w, go_r)
        for fd in (alive_r, told_w, go_r):
            os.close(fd)
        os.waitpid(opener, 0)
        self._told = b""
        self.init = self._expect("init")
        os.write(self._alive_w, b"x")  # it is our child now
        self.lacking: list[str] = self._expect("lacking")
        self.pid = _only_child(self.init)

    def let_go(self) -> None:
        """Begin."""
        os.write(self._go_w, b"x")

    def poll(self) -> int | None:
        """The exit code once the job is done: negative for a signal, as in ``subprocess``; None before."""
        return self._collect(os.WNOHANG)

    def wait(self) -> int:
        """The exit code, once the job is done."""
        code = None
        while code is None:
            code = self._collect(0)
        return code

    @property
    def state(self) -> str:
        """The kernel's letter for what the job's own process is at; X once it has gone."""
        return state_in(Path(f"/proc/{self.pid}/stat"))

    def signal(self, number: signal.Signals) -> None:
        """Signal the job, with all that it has started: it cannot leave its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def kill(self) -> None:
        """End everything inside, and reap it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.init, signal.SIGKILL)
        self.wait()

    def _collect(self, how: int) -> int | None:
        with self._lock:
            if self._exit_code is None:
                pid, _ = os.waitpid(self.init, how)
                if pid:
                    status = self._read_line().get("status")
                    self._exit_code = -signal.SIGKILL if status is None else os.waitstatus_to_exitcode(status)
            return self._exit_code

    def _expect(self, what: str) -> Any:
        """What the inside tells next, under this name.

        Raises:
            SandboxError: it has told of an error, or has ended; nothing is left of it.
        """
        report = self._read_line()
        if what in report:
            return report[what]
        if self.init:
            self.kill()
        raise SandboxError(report.get("error", "it ended before the job could begin"))

    def _read_line(self) -> dict[str, Any]:
        """The next thing that the inside has told; empty if it has ended without."""
        while b"\n" not in self._told:
            data = os.read(self._told_r, _READ_BYTES)
            if not data:
                return {}
            self._told += data
        line, _, self._told = self._told.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def _run_opener(self, alive_r: int, told_w: int, go_r: int) -> NoReturn:
        """The child that opens the namespaces, from its first instruction to its last."""
        try:
            open_outer(self._cage)
            init = os.fork()
            if init == 0:
                self._run_init(alive_r, told_w, go_r)
            _tell(told_w, init=init)
        except BaseException as error:
            _tell(told_w, error=f"no process namespace: {error}")
        finally:
            os._exit(0)

    def _run_init(self, alive_r: int, told_w: int, go_r: int) -> NoReturn:
        """The init, from its first instruction to its last."""
        try:
            if not os.read(alive_r, 1):  # the caller has died
                os._exit(1)
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if select.select([alive_r], [], [], 0)[0]:  # it died before the call
                os._exit(1)
            prctl(PR_SET_CHILD_SUBREAPER, 1)  # without a process namespace, orphans come here all the same
            lacking = be_first_to_die()  # while /proc can be written
            proc = open_inner(self._cage)
            hide_memory(True)
            init = os.getpid()
            ours, theirs = socket.socketpair()
            child = os.fork()
            if child == 0:
                os.close(alive_r)
                ours.close()
                self._run_job(init, told_w, go_r, proc, theirs, lacking)
            os.close(go_r)
            theirs.close()
            if self._cage.devices:
                naming.answer(ours, proc, self._cage, opening_calls)
            _tell(told_w, status=_reap_until(child))
        except BaseException as error:
            _tell(told_w, error=f"{type(error).__name__}: {error}")
        finally:
            os._exit(0)

    def _run_job(
        self, init: int, told_w: int, go_r: int, proc: int, names: socket.socket, lacking: list[str]
    ) -> NoReturn:
        """The job, from its first instruction to its last.

        Args:
            proc: its ``/proc`` that can be written.
            names: to the init, which lets it name its threads.
            lacking: what the init could not do.
        """
        try:
            os.setpgid(0, 0)
            self._prepare()
            hide_memory(False)  # the init's is hidden, and with it the files of /proc from a user who is not root
            peak.keep(proc)
            os.close(proc)
            with names:
                lacking += give_everything_up(self._cage, names if self._cage.devices else None)
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # after the change of user, which clears it
            if os.getppid() != init:
                os._exit(1)
            _tell(told_w, lacking=lacking)
            os.close(told_w)
        except BaseException as error:
            _tell(told_w, error=f"{type(error).__name__}: {error}")
            os._exit(1)
        try:
            if os.read(go_r, 1):
                os.close(go_r)
                self._body()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)


def _reap_until(child: int) -> int:
    """Take in the dead until this child is among them; its status."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            return status


def _only_child(pid: int) -> int:
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        return int(file.read().split()[0])


def _tell(fd: int, **what: Any) -> None:
    with contextlib.suppress(OSError):
        os.write(fd, json.dumps(what).encode() + b"\n")

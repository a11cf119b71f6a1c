"""A sandboxed process, as controlled by the process that started it.

Three processes take part: the caller, which stays outside and cannot be addressed from inside; the *init*, the first
process of the process namespace, which runs no code of the job and whose end ends everything inside; and the job, in a
process group of its own.  When the caller dies, the kernel kills the init, and with it everything in the namespace.

A fourth process is short-lived: a process that has opened a process namespace cannot start threads any more, so a child
of the caller does that, and its end makes the init a child of the caller.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from megatron.fill.errors import SandboxError
from megatron.fill.linux import peak
from megatron.fill.linux.libc import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, prctl
from megatron.fill.linux.proc import state_in
from megatron.fill.linux.tree import children
from megatron.fill.linux.wakeup import readable
from megatron.fill.sandbox import naming
from megatron.fill.sandbox.config import Sandbox
from megatron.fill.sandbox.enter import give_everything_up, open_inner, open_outer
from megatron.fill.sandbox.powers import be_first_to_die, hide_memory

_STILL = set("TtZX")  # state letters of processes that are stopped or have ended (proc_pid_stat(5))


class SandboxedProcess:
    """A sandboxed job, started by a process with a single thread that adopts orphans (``host.adopt_orphans``).

    Args:
        prepare: called in the job's process before it gives up its powers (limits, priority).
        body: code of the job, called after ``begin`` in the complete sandbox.  Its process ends when it returns.

    Raises:
        SandboxError: the sandbox cannot be set up; no process is left.
    """

    def __init__(self, sandbox: Sandbox, prepare: Callable[[], None], body: Callable[[], None]) -> None:
        self._sandbox, self._prepare, self._body = sandbox, prepare, body
        self.init = 0  # pid of the first process inside, as seen from outside
        self._exit_code: int | None = None
        self._lock = threading.Lock()  # the first thread that asks reaps the init
        alive_r, self._alive_w = os.pipe()  # end of file means that we have died
        told_r, told_w = os.pipe()
        go_r, self._go_w = os.pipe()
        opener = os.fork()
        if opener == 0:
            for fd in (self._alive_w, told_r, self._go_w):
                os.close(fd)
            self._run_opener(alive_r, told_w, go_r)
        for fd in (alive_r, told_w, go_r):
            os.close(fd)
        os.waitpid(opener, 0)
        self._told = open(told_r, "rb", closefd=False)  # noqa: SIM115 - it is read until this process ends
        self.init = self._expect("init")
        os.write(self._alive_w, b"x")  # it is our child now
        self.lacking = list(filter(None, self._expect("lacking")))  # reasons for layers that could not be set up
        self.pid = children(self.init)[0]  # that of the job and of its process group, as seen from outside

    def begin(self) -> None:
        os.write(self._go_w, b"x")

    def poll(self) -> int | None:
        """The exit code once the job has ended, negative for a signal as in ``subprocess``; None before."""
        return self._collect(os.WNOHANG)

    def wait(self) -> int:
        while (code := self._collect(0)) is None:
            pass
        return code

    def await_stop(self, within_s: float, every_s: float = 0.0001) -> bool:
        """Wait until the job's first process has stopped or ended, for at most ``within_s``; True if it has."""
        end_s = time.monotonic() + within_s
        while state_in(f"/proc/{self.pid}/stat") not in _STILL:
            if time.monotonic() >= end_s:
                return False
            time.sleep(every_s)
        return True

    def signal(self, number: signal.Signals) -> None:
        """Signal the job and all processes that it has started, which cannot leave its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def kill(self) -> None:
        """Kill everything inside, and reap the init."""
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
        """The value of the next report, which must be named ``what``; else SandboxError, and no process is left."""
        report = self._read_line()
        if what in report:
            return report[what]
        if self.init:
            self.kill()
        raise SandboxError(report.get("error", "it ended before the job could begin"))

    def _read_line(self) -> dict[str, Any]:
        """The next report from inside; empty if the inside has ended without one."""
        line = self._told.readline()
        found: dict[str, Any] = json.loads(line) if line.endswith(b"\n") else {}
        return found

    def _run_opener(self, alive_r: int, told_w: int, go_r: int) -> NoReturn:
        try:
            open_outer(self._sandbox)
            init = os.fork()
            if init == 0:
                self._run_init(alive_r, told_w, go_r)
            _tell(told_w, init=init)
        except BaseException as error:
            _tell_error(told_w, error)
        finally:
            os._exit(0)

    def _run_init(self, alive_r: int, told_w: int, go_r: int) -> NoReturn:
        try:
            if not os.read(alive_r, 1):  # the caller has died
                os._exit(1)
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if readable(0, alive_r):  # it died before the call
                os._exit(1)
            prctl(PR_SET_CHILD_SUBREAPER, 1)  # so that orphans come here even without a process namespace
            self.lacking = [be_first_to_die()]  # while /proc is writable
            proc = open_inner(self._sandbox)
            hide_memory(True)
            init = os.getpid()
            ours, theirs = socket.socketpair()
            child = os.fork()
            if child == 0:
                os.close(alive_r)
                ours.close()
                self._run_job(init, told_w, go_r, proc, theirs)
            os.close(go_r)
            theirs.close()
            if self._sandbox.devices:
                naming.answer(ours, proc, self._sandbox)
            reaped = 0
            while reaped != child:  # also orphans come here
                reaped, status = os.waitpid(-1, 0)
            _tell(told_w, status=status)
        except BaseException as error:
            _tell_error(told_w, error)
        finally:
            os._exit(0)

    def _run_job(self, init: int, told_w: int, go_r: int, proc: int, names: socket.socket) -> NoReturn:
        """Run the job's process; ``names`` is for ``naming``."""
        try:
            os.setpgid(0, 0)
            self._prepare()
            hide_memory(False)  # inherited from the init; hidden, its files in /proc are root's
            peak.keep(proc)
            os.close(proc)
            with names:
                self.lacking += give_everything_up(self._sandbox, names if self._sandbox.devices else None)
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # after the change of user, which resets it
            if os.getppid() != init:
                os._exit(1)
            _tell(told_w, lacking=self.lacking)
            os.close(told_w)
        except BaseException as error:
            _tell_error(told_w, error)
            os._exit(1)
        code = 1
        try:
            if os.read(go_r, 1):
                os.close(go_r)
                self._body()
            sys.stdout.flush()
            sys.stderr.flush()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)  # threads that the job left behind must not keep the process


def _tell(fd: int, **what: Any) -> None:
    with contextlib.suppress(OSError):
        os.write(fd, json.dumps(what).encode() + b"\n")


def _tell_error(fd: int, error: BaseException) -> None:
    _tell(fd, error=str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}")

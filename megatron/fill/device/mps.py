"""NVIDIA's MPS: one daemon per run and node, with its own pipes, so that no other program's daemon is touched.

Kernels of the training and of a worker then run at the same time on one GPU, and the driver enforces a client's memory
cap and its share of the multiprocessors; ``sharing`` describes the risk.  Static partitions and the GPU's compute mode
are never changed: both would take something from the training permanently.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.fill.device.port import MIB, DeviceError, Limits
from megatron.fill.linux.proc import text
from megatron.fill.linux.tree import read_process

PROGRAM = "nvidia-cuda-mps-control"
PIPE = "CUDA_MPS_PIPE_DIRECTORY"
_PID_FILE = "nvidia-cuda-mps-control.pid"
_OWNER_FILE = "owner"  # identity of the process for which the daemon was started
_PATH_BYTES = 107 - len("/control_privileged")  # a unix socket's address has 108 bytes with its final zero
_COMMAND_S = 5.0
_START_S = 5.0
_QUIT_S = 10


@dataclass(eq=False)
class MpsDaemon:
    """A running daemon; ``start`` or ``existing`` creates it."""

    pipe: Path  # ``CUDA_MPS_PIPE_DIRECTORY``
    log: Path  # ``CUDA_MPS_LOG_DIRECTORY``
    ours: bool  # True if this process started it, and so may stop it
    program: str  # name or path of the control program
    outside: bool = False  # True if it was started outside of this run, perhaps in another pid namespace

    @classmethod
    def start(
        cls, run_dir: Path, uuids: Sequence[str], owner: int, program: str = PROGRAM, base: Path | None = None
    ) -> MpsDaemon:
        """Start the run's daemon on this node, or return the one that another rank of ``owner`` has just started.

        A daemon and pipes left by a run that was killed are ended and removed.  DeviceError if the program is missing
        or does not start, the folder cannot be used, or another living run uses the same ``run_dir``.

        Args:
            run_dir: run folder; the log goes into its folder ``mps``.
            uuids: GPUs to serve, in the order in which the training numbers them.
            owner: pid of a process that lives as long as the run on this node, such as the ranks' common parent.
            base: folder for the pipes, whose path must be short; None for the system's folder for temporary files.
        """
        pipe = _pipe_folder(run_dir, base)
        log = run_dir / "mps"
        log.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(pipe):
            daemon = cls(pipe, log, True, program)
            if daemon._pid() is not None and daemon.answers():
                holder = text(pipe / _OWNER_FILE)
                if holder == _identity(owner):
                    daemon.ours = False
                    return daemon
                if holder and holder == _identity(int(holder.split()[0])):
                    raise DeviceError(f"{run_dir}: process {holder.split()[0]} trains there with MPS already")
                daemon._quit()
            daemon._clean()
            daemon._launch(uuids)
            (pipe / _OWNER_FILE).write_text(_identity(owner), encoding="ascii")
        return daemon

    @classmethod
    def existing(cls, pipe: Path, program: str = PROGRAM) -> MpsDaemon:
        """Use a daemon that another program runs, and never stop it; DeviceError if none answers there."""
        daemon = cls(pipe, pipe, False, program, outside=True)
        if not daemon.answers():
            raise DeviceError(f"{pipe}: no MPS daemon answers there")
        return daemon

    def answers(self) -> bool:
        return self._ask("get_server_list") is not None

    def main_environment(self, uuids: Sequence[str]) -> dict[str, str]:
        """The environment for the training's ranks, set before they use CUDA: the whole GPU, at normal priority."""
        return {
            PIPE: str(self.pipe),
            "CUDA_VISIBLE_DEVICES": ",".join(uuids),  # indices would be relative to the daemon's own devices
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100",
            "CUDA_MPS_CLIENT_PRIORITY": "0",
        }

    def environment(self, limits: Limits, device_uuid: str, overhead_bytes: int) -> dict[str, str]:
        """The environment for a worker: a single visible device, which therefore has the number 0.

        If a memory limit names a device that is not visible, the driver silently drops all limits, and some versions do
        not match UUIDs; the number 0 of a single visible device is always right.
        """
        environment = {
            PIPE: str(self.pipe),
            "CUDA_VISIBLE_DEVICES": device_uuid,
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(limits.sm_percentage),
            "CUDA_MPS_CLIENT_PRIORITY": "1",
        }
        if limits.memory_bytes is not None:
            megabytes = -(-(limits.memory_bytes + overhead_bytes) // MIB)
            environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={megabytes}M"
        return environment

    def clients(self, timeout_s: float = _COMMAND_S) -> dict[int, int]:
        """The pids of the daemon's clients, each with the pid of its server; DeviceError without an answer in time."""
        end_s = time.monotonic() + timeout_s

        def asked(command: str) -> list[int]:
            answer = self._ask(command, max(0.0, end_s - time.monotonic()))
            if answer is None:
                raise DeviceError(f"the MPS daemon of {self.pipe} did not answer {command} within {timeout_s:g} s")
            return [int(line) for line in answer.split() if line.isdigit()]

        servers = asked("get_server_list")
        return {client: server for server in servers for client in asked(f"get_client_list {server}")}

    def terminate(self, pids: Sequence[int], timeout_s: float = _COMMAND_S) -> list[int]:
        """Have the daemon take these processes off the GPU, if they are clients; return those that it did not confirm.

        A client that dies with outstanding work can end the other clients of its GPU.
        """
        end_s = time.monotonic() + timeout_s
        try:
            clients = self.clients(timeout_s)
        except DeviceError:
            return list(pids)
        left = []
        for pid in pids:
            left_s = end_s - time.monotonic()
            if pid in clients and (left_s <= 0 or self._ask(f"terminate_client {clients[pid]} {pid}", left_s) is None):
                left.append(pid)
        return left

    def stop(self) -> None:
        """Stop the daemon and remove its pipes, if we started it.  All clients must have ended, also the ranks."""
        if self.ours:
            with _locked(self.pipe):
                self._quit()
                self._clean()
            shutil.rmtree(self.pipe, ignore_errors=True)

    def _launch(self, uuids: Sequence[str]) -> None:
        environment = self._environment() | {"CUDA_VISIBLE_DEVICES": ",".join(uuids)}
        try:
            subprocess.run(
                [self.program, "-d"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_START_S,
                check=True,
            )
        except FileNotFoundError as error:
            raise DeviceError(f"{self.program} is not installed: MPS cannot be used") from error
        except (OSError, subprocess.SubprocessError) as error:
            raise DeviceError(f"the MPS daemon does not start: {error}; see {self.log}") from error
        end_s = time.monotonic() + _START_S
        while not self.answers():
            if time.monotonic() > end_s:
                raise DeviceError(f"the MPS daemon does not answer within {_START_S:g} s; see {self.log}")
            time.sleep(0.05)

    def _quit(self) -> None:
        daemon = self._pid()
        self._ask(f"quit -t {_QUIT_S}", _QUIT_S + _COMMAND_S)
        end_s = time.monotonic() + _COMMAND_S
        while daemon is not None and _is_daemon(daemon):
            if time.monotonic() > end_s:
                return  # _clean kills it
            time.sleep(0.02)

    def _clean(self) -> None:
        """Kill a daemon that does not answer, and empty the pipe folder."""
        daemon = self._pid()
        if daemon is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(daemon, signal.SIGKILL)
        for entry in self.pipe.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)

    def _pid(self) -> int | None:
        """The pid of the daemon; None if there is none that lives."""
        found = text(self.pipe / _PID_FILE).strip()
        return int(found) if found.isdigit() and _is_daemon(int(found)) else None

    def _ask(self, command: str, timeout_s: float = _COMMAND_S) -> str | None:
        """The daemon's answer to a command; None if it gave none."""
        if not (self.pipe / _PID_FILE).exists():  # the program would wait for a daemon
            return None
        try:
            done = subprocess.run(
                [self.program],
                input=command + "\n",
                env=self._environment(),
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout if done.returncode == 0 else None

    def _environment(self) -> dict[str, str]:
        return dict(os.environ) | {PIPE: str(self.pipe), "CUDA_MPS_LOG_DIRECTORY": str(self.log)}


def _pipe_folder(run_dir: Path, base: Path | None) -> Path:
    """Create the run's pipe folder, which is the same for every start on this node and open to this user only."""
    digest = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:12]
    name = f"pipefill-mps-{os.getuid()}-{digest}"
    pipe = (base or Path(tempfile.gettempdir())) / name
    if base is None and len(os.fsencode(pipe)) > _PATH_BYTES:  # a batch system may set a long TMPDIR
        pipe = Path("/tmp") / name
    if len(os.fsencode(pipe)) > _PATH_BYTES:
        raise DeviceError(f"{pipe}: too long for the MPS pipes; expected at most {_PATH_BYTES} bytes")
    pipe.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = pipe.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise DeviceError(f"{pipe}: expected a folder of this user's that nobody else may enter")
    return pipe


@contextlib.contextmanager
def _locked(pipe: Path) -> Iterator[None]:
    """Hold a lock, so that only one rank of a node starts or stops the daemon at a time."""
    fd = os.open(pipe, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _identity(pid: int) -> str:
    process = read_process(pid)
    return f"{pid} {process.started if process is not None else ''}"


def _is_daemon(pid: int) -> bool:
    """True if the process is alive and an MPS daemon; its pid may have been reused."""
    process = read_process(pid)
    return process is not None and process.alive and PROGRAM in text(f"/proc/{pid}/cmdline")

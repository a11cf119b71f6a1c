"""NVIDIA's MPS: one daemon per run and node, with pipes of its own, so that no other program's daemon is touched.

Kernels of the main job and of a worker then run side by side on one GPU, and the driver keeps a client's memory cap
and its share of the multiprocessors.  The price is in ``sharing``.  Neither static partitioning nor the GPU's compute
mode is ever touched: both take something from the main job for good.
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
from pathlib import Path

from megatron.fill.device.port import MIB, DeviceError, Limits
from megatron.fill.linux.tree import read_process

PROGRAM = "nvidia-cuda-mps-control"
_PID_FILE = "nvidia-cuda-mps-control.pid"
_OWNER_FILE = "owner"  # who the daemon was started for
_PATH_BYTES = 107 - len("/control_privileged")  # a unix socket's address has 108 bytes with its final zero
_COMMAND_S = 5.0
_START_S = 5.0
_QUIT_S = 10


class MpsDaemon:
    """A running daemon.  Made by ``start`` or ``existing``.

    Attributes:
        pipe: ``CUDA_MPS_PIPE_DIRECTORY``.
        ours: we started it, and so we may stop it.
    """

    def __init__(self, pipe: Path, log: Path, ours: bool, program: str) -> None:
        self.pipe = pipe
        self.log = log
        self.ours = ours
        self._program = program

    @classmethod
    def start(
        cls, run_dir: Path, uuids: Sequence[str], owner: int, program: str = PROGRAM, base: Path | None = None
    ) -> MpsDaemon:
        """The run's daemon on this node: a new one, or the one that another rank of ``owner`` has just started.

        What a run that was killed left behind (a daemon, its pipes) is ended and removed.

        Args:
            run_dir: the log goes to its folder ``mps``.
            uuids: the GPUs to serve, in the order in which the main job numbers them.
            owner: a process that lives as long as the run on this node, such as the ranks' common parent.
            base: where the pipes go; must be short, the system's folder for temporary files by default.

        Raises:
            DeviceError: there is no such program, it does not start, the folder cannot be used, or another run that is
                alive uses the same ``run_dir``.
        """
        pipe = _pipe_folder(run_dir, base)
        log = run_dir / "mps"
        log.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(pipe):
            daemon = cls(pipe, log, True, program)
            left = daemon._pid()
            if left is not None and _is_daemon(left) and daemon.answers():
                holder = _owner(pipe)
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
        """A daemon that somebody else runs; it is used and never stopped.

        Raises:
            DeviceError: none answers there.
        """
        daemon = cls(pipe, pipe, False, program)
        if not daemon.answers():
            raise DeviceError(f"{pipe}: no MPS daemon answers there")
        return daemon

    def answers(self) -> bool:
        return self._ask("get_server_list") is not None

    def main_environment(self, uuids: Sequence[str]) -> dict[str, str]:
        """For the main job's ranks, before they use CUDA: all of the GPU, at normal priority.

        Args:
            uuids: as given to ``start``.  Indices would be counted anew among the daemon's own devices.
        """
        return {
            "CUDA_MPS_PIPE_DIRECTORY": str(self.pipe),
            "CUDA_VISIBLE_DEVICES": ",".join(uuids),
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100",
            "CUDA_MPS_CLIENT_PRIORITY": "0",
        }

    def environment(self, limits: Limits, device_uuid: str, overhead_bytes: int) -> dict[str, str]:
        """For a worker: it sees this one device, which is thereby its number 0.

        A memory limit that names a device which is not visible makes the driver drop all limits without a word, and
        some versions do not match UUIDs: number 0 of a single visible device is always right.
        """
        environment = {
            "CUDA_MPS_PIPE_DIRECTORY": str(self.pipe),
            "CUDA_VISIBLE_DEVICES": device_uuid,
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(limits.sm_percentage),
            "CUDA_MPS_CLIENT_PRIORITY": "1",
        }
        if limits.memory_bytes is not None:
            megabytes = -(-(limits.memory_bytes + overhead_bytes) // MIB)
            environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={megabytes}M"
        return environment

    def clients(self, timeout_s: float = _COMMAND_S) -> dict[int, int]:
        """The processes that use the daemon, each with its server's pid.

        Raises:
            DeviceError: it did not answer in time.
        """
        end_s = time.monotonic() + timeout_s

        def asked(command: str) -> list[int]:
            answer = self._ask(command, max(0.0, end_s - time.monotonic()))
            if answer is None:
                raise DeviceError(f"the MPS daemon of {self.pipe} did not answer {command} within {timeout_s:g} s")
            return _numbers(answer)

        servers = asked("get_server_list")
        return {client: server for server in servers for client in asked(f"get_client_list {server}")}

    def terminate(self, pids: Sequence[int], timeout_s: float = _COMMAND_S) -> list[int]:
        """Take these processes off the GPU, where they are clients, before they are killed.

        A client that dies with work outstanding can take the others of its GPU with it.

        Returns:
            Those of which the daemon did not say in time that it was done, or that they are no clients.
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
        """End it and remove its pipes, if we started it.  All clients must have ended, the main job's ranks too."""
        if self.ours:
            with _locked(self.pipe):
                self._quit()
                self._clean()
            shutil.rmtree(self.pipe, ignore_errors=True)

    def _launch(self, uuids: Sequence[str]) -> None:
        environment = self._environment() | {"CUDA_VISIBLE_DEVICES": ",".join(uuids)}
        try:
            subprocess.run(
                [self._program, "-d"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_START_S,
                check=True,
            )
        except FileNotFoundError as error:
            raise DeviceError(f"{self._program} is not installed: MPS cannot be used") from error
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
                return  # _clean ends it
            time.sleep(0.02)

    def _clean(self) -> None:
        """Remove what is in the folder of pipes, after ending a daemon that is there and does not answer."""
        daemon = self._pid()
        if daemon is not None and _is_daemon(daemon):
            with contextlib.suppress(ProcessLookupError):
                os.kill(daemon, signal.SIGKILL)
        for entry in self.pipe.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)

    def _pid(self) -> int | None:
        try:
            return int((self.pipe / _PID_FILE).read_text(encoding="ascii"))
        except (OSError, ValueError):
            return None

    def _ask(self, command: str, timeout_s: float = _COMMAND_S) -> str | None:
        """The daemon's answer; None if it gave none."""
        if not (self.pipe / _PID_FILE).exists():  # the program would wait for one
            return None
        try:
            done = subprocess.run(
                [self._program],
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
        ours = {"CUDA_MPS_PIPE_DIRECTORY": str(self.pipe), "CUDA_MPS_LOG_DIRECTORY": str(self.log)}
        return dict(os.environ) | ours


def _pipe_folder(run_dir: Path, base: Path | None) -> Path:
    """The same for every start of a run on this node, and for this user only."""
    digest = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:12]
    name = f"pipefill-mps-{os.getuid()}-{digest}"
    pipe = (base or Path(tempfile.gettempdir())) / name
    if base is None and len(os.fsencode(pipe)) > _PATH_BYTES:  # a scheduler's own folder for temporary files
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
    """Only one rank of a node starts or stops the daemon at a time."""
    fd = os.open(pipe, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _identity(pid: int) -> str:
    process = read_process(pid)
    return f"{pid} {process.started if process is not None else ''}"


def _owner(pipe: Path) -> str:
    try:
        return (pipe / _OWNER_FILE).read_text(encoding="ascii")
    except OSError:
        return ""


def _is_daemon(pid: int) -> bool:
    """Whether the process is alive and an MPS daemon: the number may have become another's."""
    process = read_process(pid)
    try:
        return process is not None and process.alive and PROGRAM.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _numbers(text: str) -> list[int]:
    return [int(line) for line in text.split() if line.isdigit()]

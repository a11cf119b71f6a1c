"""A private SLURM: its own munged, slurmctld and slurmds in a temporary folder, gone afterwards."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

_START_S = 60
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
_CONFIGURATION = """
ClusterName=pipefill
SlurmctldHost={host}
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
SlurmUser=root
SlurmdUser=root
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin={task_plugin}
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
ReturnToService=2
MailProg=/bin/true
KillWait=30
SlurmdTimeout=30
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class NoSlurm(Exception):
    """It cannot be run here; the message says why."""


class PrivateSlurm:
    """A running SLURM, as a context manager.

    Args:
        nodes: how many there are, all on this machine.
        cpus: how many each claims to have.
        task_plugin: ``task/affinity`` binds tasks to cores; ``task/none`` does not.

    Raises:
        NoSlurm: it is not installed, or does not start.
    """

    def __init__(self, nodes: int = 1, cpus: int = 2, task_plugin: str = "task/none") -> None:
        if os.geteuid() != 0:
            raise NoSlurm("only root can start slurmd")
        missing = [name for name in _PROGRAMS if _program(name) is None]
        if missing:
            raise NoSlurm(f"SLURM is not installed: no {', '.join(missing)}")
        self.nodes = [f"n{number + 1}" for number in range(nodes)]
        self._cpus, self._task_plugin = cpus, task_plugin
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> PrivateSlurm:
        self.folder = Path(tempfile.mkdtemp(prefix="pipefill-slurm-", dir="/var/tmp"))
        self.folder.chmod(0o755)
        try:
            self._configure()
            self._start_munge()
            self._start("slurmctld", "slurmctld", "-D", "-f", self._file)
            for node in self.nodes:
                self.start_node(node)
            self._wait(
                "every node is idle", lambda: self.call("sinfo", "-h", "-o", "%D %t") == f"{len(self.nodes)} idle"
            )
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    @property
    def environment(self) -> dict[str, str]:
        """For SLURM's commands."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "SRUN"))}
        return own | {"SLURM_CONF": str(self._file)}

    def call(self, *command: str, cwd: Path | None = None, **variables: str) -> str:
        """What one of SLURM's commands says.

        Raises:
            AssertionError: it failed.
        """
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=cwd, env=self.environment | variables, timeout=60
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def submit(self, *arguments: str, cwd: Path, **variables: str) -> str:
        """The number of a new job."""
        return self.call("sbatch", "--parsable", *arguments, cwd=cwd, **variables)

    def state(self, job: str) -> str:
        """RUNNING, PENDING, COMPLETED, ..."""
        shown = self.call("scontrol", "show", "job", job)
        return shown.partition("JobState=")[2].split()[0]

    def wait_for(self, job: str, *states: str, seconds: float = 240) -> str:
        self._wait(f"job {job} is {states}", lambda: self.state(job) in states, seconds)
        return self.state(job)

    def start_node(self, node: str) -> None:
        (self.folder / f"spool-{node}").mkdir(exist_ok=True)
        self._start(node, "slurmd", "-D", "-N", node, "-f", self._file)

    def lose_node(self, node: str) -> None:
        """The node is gone with all that ran on it, without a word."""
        daemon = self._daemons.pop(node)
        for pid in [*_below(daemon.pid), daemon.pid]:
            _kill(pid)
        daemon.wait()

    @property
    def _file(self) -> Path:
        return self.folder / "slurm.conf"

    def _configure(self) -> None:
        host = socket.gethostname().partition(".")[0]
        ports = _free_ports(1 + len(self.nodes))
        lines = [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={self._cpus} RealMemory=1000"
            for node, port in zip(self.nodes, ports[1:], strict=True)
        ]
        (self.folder / "state").mkdir()
        self._file.write_text(
            _CONFIGURATION.format(
                host=f"{host}(127.0.0.1)",
                ports=ports,
                folder=self.folder,
                task_plugin=self._task_plugin,
                nodes="\n".join(lines),
            )
        )

    def _start_munge(self) -> None:
        folder = self.folder / "munge"
        folder.mkdir()
        key = folder / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        user = pwd.getpwnam("munge" if "munge" in {entry.pw_name for entry in pwd.getpwall()} else "root")
        for path in (folder, key):
            os.chown(path, user.pw_uid, user.pw_gid)
        places = [f"--{name}={folder / name}" for name in ("key-file", "socket", "pid-file", "log-file", "seed-file")]
        places[0] = f"--key-file={key}"
        command = ["munged", "--foreground", "--num-threads=2", *places]
        if user.pw_uid:
            command = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups", "--", *command]
        self._start("munged", *command)
        self._wait("munged listens", (folder / "socket").exists)

    def _start(self, name: str, program: str, *arguments: str | Path) -> None:
        log = (self.folder / f"{name}.out").open("ab")
        with log:
            self._daemons[name] = subprocess.Popen(
                [_program(program) or program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
                start_new_session=True,
                cwd="/",
            )

    def _wait(self, what: str, condition: Callable[[], bool], seconds: float = _START_S) -> None:
        end_s = time.monotonic() + seconds
        while True:
            try:
                if condition():
                    return
            except AssertionError:  # the controller is not there yet
                pass
            ended = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
            if ended or time.monotonic() > end_s:
                said = "".join(path.read_text(errors="replace")[-600:] for path in sorted(self.folder.glob("*.out")))
                raise NoSlurm(f"{what}: not within {seconds:g} s ({ended} ended): {said[-2000:]}")
            time.sleep(0.2)

    def _end(self) -> None:
        for name in [*self.nodes, "slurmctld", "munged"]:
            daemon = self._daemons.pop(name, None)
            if daemon is not None:
                below = _below(daemon.pid)
                daemon.terminate()
                try:
                    daemon.wait(10)
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    daemon.wait()
                for pid in below:
                    _kill(pid)
        shutil.rmtree(self.folder, ignore_errors=True)


def _program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


def _below(pid: int) -> list[int]:
    from megatron.fill.linux.tree import descendants

    return list(descendants(pid))


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _free_ports(count: int) -> list[int]:
    taken = [socket.socket() for _ in range(count)]
    try:
        for one in taken:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in taken]
    finally:
        for one in taken:
            one.close()

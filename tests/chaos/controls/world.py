"""The world of a control: namespaces in which nothing belongs to the machine, with stand-ins of a training."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import struct
import termios
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from megatron.fill.folders import AGENTS, CONTROL, JOBS, LOCKS, OUTPUT, RECORDS, RUN_LOCK
from megatron.fill.linux import host, memfd
from megatron.fill.linux.libc import PR_SET_PDEATHSIG, prctl
from megatron.fill.pages import steplog
from megatron.fill.sandbox import mounts
from megatron.fill.sandbox.config import Bind, Sandbox
from megatron.fill.sandbox.powers import limit_resources
from megatron.fill.sandbox.process import SandboxedProcess
from tests.chaos.attacks.base import Attack, Ground, NoTargetError, Refused
from tests.chaos.controls.walls import CAGE, KERNEL, NAMESPACES, Wall, leave_out
from tests.chaos.programs import agent_program, warden_program
from tests.chaos.sight import look
from tests.chaos.targets import Targets

_MIB, _PAGE_BYTES = 1 << 20, 4096
_SHARED_BYTES, _DISK_BYTES = 1024 * _MIB, 64 * _MIB
_MEMORY_BYTES, _TASKS, _FILES = 512 * _MIB, 100_000, 1024  # others may have processes of the same user
_DATA_BYTES = 8 << 30  # per process, each a copy of the one that runs the controls
_NOBODY = 65534
_FIRST_PID = 20_000  # lowest pid of the stand-ins, which the job's own namespace does not have
_STAYS_S = 60.0
_LOOPBACK = struct.Struct("16sH14x")
_SHELL = "/bin/sh"
PLACE = Path("/srv")  # exists on every Linux system; the world mounts its disk there


@dataclass
class World:
    """The surroundings of an attack, which proofs look at.

    Attributes:
        folder: stand-in of a chaos run's disk.
        directory: the job's own folder.
        other: another job's folder.
        marks: folder in which a job may note its actions.
        ranks, agents, listeners: pids of stand-ins in this world.
        init, job: pids of the job's first and second process in this world; 0 before they exist.
        pages: descriptors of the shared pages, by name.
        text: message of the attack.
    """

    folder: Path
    directory: Path
    other: Path
    marks: Path
    ranks: list[int] = field(default_factory=list)
    agents: list[int] = field(default_factory=list)
    listeners: list[int] = field(default_factory=list)
    init: int = 0
    job: int = 0
    pages: dict[str, int] = field(default_factory=dict)
    text: str = ""

    def targets(self) -> Targets:
        """The targets that the attack is told."""
        return look(self.ranks, self.agents, self.directory.parents[1])


def enter() -> None:
    """Leave all of the machine's namespaces; the caller's next child is the first process of the world.

    Raises:
        OSError: this process is not root.
    """
    os.setsid()
    os.unshare(
        os.CLONE_NEWPID | os.CLONE_NEWNS | os.CLONE_NEWNET | os.CLONE_NEWIPC | os.CLONE_NEWUTS | os.CLONE_NEWCGROUP
    )


def settle(folder: Path) -> World:
    """Create the world's ``/proc``, network, terminal and folders; called by its first process.

    Raises:
        OSError: one of them cannot be created.
    """
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of Python's own: one of the attacks sends it to process 1
    mounts.make_private()
    mounts.mount("proc", "/proc", "proc", 0)
    mounts.mount("tmpfs", "/dev/shm", "tmpfs", 0, f"size={_SHARED_BYTES},mode=1777")
    mounts.mount("tmpfs", str(PLACE), "tmpfs", 0, f"size={_DISK_BYTES},mode=755")
    with contextlib.suppress(OSError):  # otherwise pids may exist in the job's namespace too, and are not used
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(_FIRST_PID), encoding="ascii")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        _, flags = _LOOPBACK.unpack(fcntl.ioctl(any_socket, 0x8913, _LOOPBACK.pack(b"lo", 0)))
        fcntl.ioctl(any_socket, 0x8914, _LOOPBACK.pack(b"lo", flags | 1))
    _, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    world = _laid_out(folder)
    _make_pages(world)
    _listen()
    _stand_in(world, terminal)
    return world


def _laid_out(folder: Path) -> World:
    """Create folders and files as in a run."""
    disk = PLACE / folder.name
    run = disk / "run-0"
    jobs = run / JOBS
    world = World(disk, jobs / "job-1", jobs / "other-2", folder / "marks")
    for name, text in (
        (RUN_LOCK, ""),
        (f"{AGENTS}/spec0.json", "{}"),
        (f"{RECORDS}/1/rank0.bin", "x"),
        (f"{CONTROL}/1/rank0.json", "{}"),
        (f"{LOCKS}/other-2", ""),
        (f"{OUTPUT}/other-2.log", "secret\n"),
        (f"{JOBS}/other-2/result.json", "{}"),
        (f"{JOBS}/other-2/checkpoint.pt", "weights"),
    ):
        file = run / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    world.directory.mkdir()
    world.marks.mkdir()
    for name in ("jobs.db", "jobs.db-wal", "jobs.db-shm"):
        (disk / name).touch()
    for path in (folder, disk, run, jobs):
        path.chmod(0o755)
    if os.geteuid() == 0:
        for path in (world.directory, world.other, *world.other.iterdir()):
            os.chown(path, _NOBODY, _NOBODY)
    return world


def _make_pages(world: World) -> None:
    """Create the pages without mapping them: a mapping would be the job's too."""
    for name in ("gate", "cycle", "control", "baton"):
        world.pages[name] = memfd.create(name, _PAGE_BYTES, sealable=name in ("gate", "cycle"))
    world.pages["steps"] = steplog.create_log()


def _listen() -> None:
    """Listen on sockets for as long as this process lives."""
    for family, address in ((socket.AF_INET, ("127.0.0.1", 0)), (socket.AF_UNIX, "\0pipefill-control")):
        one = socket.socket(family)
        one.bind(address)
        one.listen()
        one.detach()


def _stand_in(world: World, terminal: int) -> None:
    """Start processes that look like a rank, an agent and a warden, and sleep."""
    store, spec = world.folder / "jobs.db", world.folder / "run-0" / "agents" / "spec0.json"
    world.ranks.append(_sleeper(world, terminal, "pretrain_gpt.py", "--fill-store", str(store)))
    world.agents.append(_sleeper(world, terminal, warden_program(), str(spec)))
    world.agents.append(_sleeper(world, terminal, agent_program(), str(spec), "1"))
    for pid in (*world.ranks, *world.agents):
        while not Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sh\0"):
            time.sleep(0.001)


def _sleeper(world: World, terminal: int, *words: str) -> int:
    pid = os.fork()
    if pid == 0:
        read, _write = os.pipe()
        os.set_inheritable(_write, True)
        os.dup2(read, 0)
        for fd in (1, 2):
            os.dup2(terminal, fd)
        for fd in world.pages.values():
            os.set_inheritable(fd, True)
        os.execve(_SHELL, ["sh", "-c", "read line", "sh", *words], {"SECRET_TOKEN": "x"})
    return pid


def confine(world: World, attack: Attack, walls: Collection[Wall], tell: int) -> SandboxedProcess:
    """Start the job behind all layers but ``walls``; once released it commits its attack, and stays.

    Args:
        tell: descriptor to which it writes the outcome, a line of JSON.
    """
    if Wall.START in walls:  # code that runs before the sandbox has no layers
        walls = (*walls, *KERNEL)
    leave_out(walls)
    root = os.geteuid() == 0
    sandbox = Sandbox(
        namespaces=tuple(name for name, wall in NAMESPACES.items() if wall not in walls),
        directory=str(world.directory),
        binds=(Bind(str(world.marks), writable=True),),
        runs=(str(world.directory.parents[1]),),
        masked=tuple(str(path) for path in sorted(world.folder.glob("jobs.db*"))),
        user=_NOBODY if root else None,
        group=_NOBODY if root else None,
        memory_files_bytes=_MEMORY_BYTES,
        without=tuple(name for name, wall in CAGE.items() if wall in walls),
    )
    if Wall.USER in walls:
        os.chown(world.directory, os.geteuid(), os.getegid())
    if Wall.DESCRIPTORS in walls:
        os.open("/proc/self/coredump_filter", os.O_RDWR)  # left open, as a process that starts a job might
    told = world.targets()
    _map_pages(world, writable=Wall.PAGES in walls)

    def prepare() -> None:
        host.yield_to_main_job()
        if Wall.LIMITS not in walls:
            limit_resources(_DATA_BYTES, _TASKS, _FILES)

    def body() -> None:
        os.chdir(world.directory)
        output = os.open("output.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        for fd in () if Wall.DESCRIPTORS in walls else world.pages.values():
            os.close(fd)
        signal.signal(signal.SIGUSR1, lambda *_: None)  # as a worker, whom its agent asks so
        ground = Ground(world.directory, world.folder, 0, told, private=True)
        _report(tell, lambda: attack.commit(ground))
        time.sleep(_STAYS_S)

    host.adopt_orphans()
    return SandboxedProcess(sandbox, prepare, body)


def _map_pages(world: World, *, writable: bool) -> None:
    """Map the pages as in a worker, read-only where it may only read; with ``writable`` all are writable."""
    for name, fd in world.pages.items():
        size = os.fstat(fd).st_size
        if writable or name in ("baton", "steps"):
            memfd.map_page(fd, size, writable=True)
            continue
        if name != "control":
            memfd.close_to_writers(fd)
        reader = memfd.reader_fd(fd)
        memfd.map_page(reader, size, writable=False)
        os.close(reader)


def _report(tell: int, commit: Callable[[], str]) -> None:
    try:
        said = ("done", commit())
    except NoTargetError as error:
        said = ("no target", str(error))
    except (OSError, Refused) as error:
        said = ("refused", str(error))
    except BaseException as error:
        said = ("error", f"{type(error).__name__}: {error}")
    os.write(tell, json.dumps(said).encode() + b"\n")


def alive(pid: int) -> str:
    """The kernel's letter for a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return ""

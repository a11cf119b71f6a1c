"""Evidence of attacks that have succeeded, as seen from outside the job by the first process of its world.

Each function looks once and returns its evidence in a few words; empty without any.  Readers read without care what the
job left, in a process of their own.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import pickle
import resource
import signal
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.fill.linux import futex, memfd
from megatron.fill.linux.proc import stat_fields
from megatron.fill.linux.tree import TICKS_PER_S
from megatron.fill.pages.steplog import StepLog
from tests.chaos.controls.world import World

_MIB = 1 << 20
_BUSY_S, _READ_S = 0.25, 0.5
_MEMORY = 3 << 30  # more than this process needs; a read must not take the machine's memory
_NEVER_NS, _HEADER_WORDS = 3600 * 10**9, 32
_ODD = 1e15  # more steps than any job does


def _field(pid: int, name: str) -> str:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(name + ":"):
                return line.partition(":")[2].strip()
    return ""


def _pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _jobs(world: World) -> list[int]:
    """The job's processes: all but this one and the stand-ins."""
    others = {os.getpid(), world.init, *world.ranks, *world.agents, *world.listeners}
    return [pid for pid in _pids() if pid not in others]


def rank_is_dead(world: World) -> str:
    gone = [pid for pid in world.ranks if _field(pid, "State")[:1] in ("", "Z")]
    return f"the rank {gone[0]} is dead" if gone else ""


def agents_are_dead(world: World) -> str:
    gone = [pid for pid in world.agents if _field(pid, "State")[:1] in ("", "Z")]
    return "agent and warden are dead" if len(gone) == len(world.agents) else ""


def rank_is_stopped(world: World) -> str:
    return "the rank is stopped" if _field(world.ranks[0], "State")[:1] == "T" else ""


def agents_are_stopped(world: World) -> str:
    return "agent and warden are stopped" if all(_field(pid, "State")[:1] == "T" for pid in world.agents) else ""


def job_is_stopped(world: World) -> str:
    return "it is stopped, and nobody continues it" if _field(world.job, "State")[:1] == "T" else ""


def job_is_gone(world: World) -> str:
    return "its main thread has ended, and it is there" if _field(world.job, "State")[:1] == "Z" else ""


def job_is_another(world: World) -> str:
    return "it is another program" if _field(world.job, "Name") == "sleep" else ""


def outlives(world: World) -> str:
    """Processes of the job that are left when the job has been ended."""
    before = set(_jobs(world)) - {world.job}
    if not before:
        return ""
    for pid in (world.job, world.init):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    time.sleep(0.05)
    left = [pid for pid in before if _field(pid, "State")[:1] not in ("", "Z")]
    return f"{len(left)} processes outlive it" if left else ""


def _cpu_s(world: World) -> float:
    ticks = 0
    for pid in _jobs(world):
        with contextlib.suppress(OSError, ValueError, IndexError):
            ticks += sum(map(int, stat_fields(f"/proc/{pid}/stat")[13:15]))
    return ticks / TICKS_PER_S


def busy(world: World) -> str:
    """CPU time that the job uses without a bubble; the amount depends on the other load."""
    before = _cpu_s(world)
    time.sleep(_BUSY_S)
    used_s = _cpu_s(world) - before
    return f"{used_s:.2f} s of CPU in {_BUSY_S:g} s" if used_s > 0 else ""


def zombies(world: World) -> str:
    count = sum(_field(pid, "State")[:1] == "Z" for pid in _jobs(world))
    return f"{count} dead children" if count >= 500 else ""


def threads(world: World) -> str:
    count = int(_field(world.job, "Threads") or 0)
    return f"{count} threads" if count >= 300 else ""


def memory_files(world: World) -> str:
    """Memory in files without a name."""
    size = 0
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{world.job}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(entry.path).startswith("/memfd:hoard"):
                    size += os.stat(entry.path).st_blocks * 512
    return f"{size // _MIB} MiB" if size > 256 * _MIB else ""


def shared_memory(world: World) -> str:
    """Memory that the attack would take from the machine's ``/dev/shm``."""
    at = os.statvfs("/dev/shm")
    used = (at.f_blocks - at.f_bfree) * at.f_frsize
    return f"{used // _MIB} MiB" if used > 256 * _MIB else ""


def shared_names(world: World) -> str:
    count = sum(len(files) for _, _, files in os.walk("/dev/shm"))
    return f"{count} files" if count > 1000 else ""


def disk_is_full(world: World) -> str:
    return "no byte is free" if os.statvfs(world.folder).f_bavail == 0 else ""


def locked_memory(world: World) -> str:
    size = int((_field(world.job, "VmLck") or "0").split()[0])
    return f"{size} kB are locked" if size >= 90 << 10 else ""


def core_file(world: World) -> str:
    found = [path for path in world.directory.iterdir() if path.name.startswith("core")]
    return f"{found[0].name} has {found[0].stat().st_size} bytes" if found else ""


def output(least: int, part: bytes = b"") -> Callable[[World], str]:
    """At least so many bytes, ``part`` among them, in the output of the job."""

    def look(world: World) -> str:
        path = world.directory / "output.log"
        size = path.stat().st_size if path.exists() else 0
        return f"{size} bytes" if size >= least and part in path.read_bytes() else ""

    return look


def no_output(world: World) -> str:
    with contextlib.suppress(OSError):
        if not os.path.exists(f"/proc/{world.job}/fd/1"):
            return "its output is closed"
    return ""


def odd_names(world: World) -> str:
    return "names that a terminal acts on" if any("\x1b" in name for name in os.listdir(world.directory)) else ""


def closed(world: World) -> str:
    return "nobody may enter" if world.directory.stat().st_mode & 0o777 == 0 else ""


def folder_is_locked(world: World) -> str:
    """The job's folder is still locked after the job has died."""
    fd = os.open(world.directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "the dead job's folder is locked"
    finally:
        os.close(fd)
    return ""


def careless(read: Callable[[World], object]) -> Callable[[World], str]:
    """A reader without care that comes to harm: it fails, takes too long, or believes what cannot be true.

    Args:
        read: reads in a process of its own; returns the harmful content that it believes, or nothing.
    """

    def look(world: World) -> str:
        read_fd, write_fd = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
                found = read(world)
                said = f"a plain reader believes {str(found)[:80]!r}" if found else ""
            except FileNotFoundError:
                said = ""
            except BaseException as error:
                said = f"a plain reader fails: {type(error).__name__}: {str(error)[:80]}"
            os.write(write_fd, said.encode("utf-8", "replace"))
            os._exit(0)
        os.close(write_fd)
        end_s = time.monotonic() + _READ_S
        code = 0
        while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < end_s:
            time.sleep(0.01)
        code = ended[1]
        if not ended[0]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        said = os.read(read_fd, 4096).decode("utf-8", "replace")
        os.close(read_fd)
        if not ended[0]:
            return "a plain reader does not come back"
        return said or (f"a plain reader ends with {os.waitstatus_to_exitcode(code)}" if code else "")

    return look


def plain_json(name: str) -> Callable[[World], object]:
    """Read a file of the job's folder as JSON, and trust the types of its parts."""

    def read(world: World) -> object:
        found = json.loads((world.directory / name).read_bytes())
        if name == "profile.json":
            return [one["nodes"][0]["duration_ns"] + 1 for one in found]
        text = json.dumps(found, ensure_ascii=False)
        return text if "\u202e" in text or "\x1b" in json.loads(f'"{next(iter(found))}"') else None

    return read


def plain_bytes(name: str) -> Callable[[World], object]:
    """Read the whole of a file of the job's folder."""

    def read(world: World) -> object:
        data = (world.directory / name).read_bytes()
        return f"{len(data)} bytes" if len(data) > 1 << 30 else None

    return read


def unpickled(world: World) -> object:
    """Load the checkpoint with pickle, and check if that ran code."""
    with contextlib.suppress(Exception):
        pickle.loads((world.directory / "checkpoint.pt").read_bytes())
    return "the checkpoint ran code" if (world.directory / "bomb-went-off").exists() else None


def last_word(world: World) -> object:
    """Read the last word as JSON, and believe it."""
    said = StepLog(world.pages["steps"]).word
    if not said:
        return None
    word = json.loads(said)
    for name, kind in (("cause", str), ("detail", str), ("then", str), ("unit", str)):
        if not isinstance(word[name], kind):
            raise TypeError(f"{name} is {word[name]!r}")
    detail = word["detail"]
    if not detail.isprintable() or len(detail) > 10_000:
        return detail
    total = word["total_work"]
    if total is not None and (not math.isfinite(float(total)) or total > _ODD):
        return total
    return word["cause"] if word["cause"] in ("finished", "cancelled") else None


def odd_work(world: World) -> str:
    """An impossible amount of work in the step log, read without the care that ``StepLog`` itself takes.

    The other words of the header are integers that are tiny as floats.
    """
    words = struct.unpack(f"{_HEADER_WORDS}d", os.pread(world.pages["steps"], 8 * _HEADER_WORDS, 0))
    odd = [word for word in words if not abs(word) < _ODD]
    return f"it says that there are {odd[0]} steps" if odd else ""


def says(word: str) -> Callable[[World], str]:
    """The attack's own message, if it has this word."""
    return lambda world: world.text if word in world.text else ""


def deep_folders(world: World) -> str:
    """The failure of a walk through the folders by name, before their end is reached."""
    try:
        found = sum(1 for _ in os.walk(world.directory))
        return "" if found < 3 else f"{found} folders"
    except (OSError, RecursionError) as error:
        return f"who goes through it fails: {error}"


def many_files(least: int) -> Callable[[World], str]:
    """At least so many files in the job's folder and below."""

    def look(world: World) -> str:
        count = sum(len(files) for _, _, files in os.walk(world.directory))
        return f"{count} files" if count >= least else ""

    return look


def there(*names: str) -> Callable[[World], str]:
    """These names exist in the job's folder."""
    return lambda world: ", ".join(names) if all(os.path.lexists(world.directory / name) for name in names) else ""


def big_file(world: World) -> str:
    sizes = [path.stat().st_size for path in world.directory.glob("*.json")]
    return f"a file of {max(sizes) >> 30} GiB" if sizes and max(sizes) > 1 << 33 else ""


def page_changes(name: str) -> Callable[[World], str]:
    """The page is no longer zero."""

    def look(world: World) -> str:
        # Only the beginning: the rest of a step log is its last word.
        data = os.pread(world.pages[name], 4096, 0)
        return f"{name} begins with {data[:8].hex()}" if any(data) else ""

    return look


def page_is_empty(name: str) -> Callable[[World], str]:
    """The content of the page is gone; see ``filled``."""
    return lambda world: f"{name} is empty" if not any(os.pread(world.pages[name], 64, 0)) else ""


def filled(name: str) -> Callable[[World], contextlib.AbstractContextManager[None]]:
    """Write something into a page beforehand."""

    @contextmanager
    def prepare(world: World) -> Iterator[None]:
        os.pwrite(world.pages[name], b"\x01" * 64, 0)
        yield

    return prepare


def listening(name: str) -> Callable[[World], contextlib.AbstractContextManager[None]]:
    """Start a process that sleeps on a page until it changes, as agents do, and takes a wake-up for a change."""

    @contextmanager
    def prepare(world: World) -> Iterator[None]:
        reader = os.fork()
        if reader == 0:
            _, address = memfd.map_page(world.pages[name], 4096, writable=False)
            futex.wait(address, 0, _NEVER_NS)
            os._exit(0)
        world.listeners.append(reader)
        while _field(reader, "State")[:1] != "S":
            time.sleep(0.002)
        yield

    return prepare


def woken(world: World) -> str:
    """The process that slept on the page is awake, though the page has not changed."""
    return "who slept on the page is awake" if _field(world.listeners[0], "State")[:1] in ("", "Z") else ""

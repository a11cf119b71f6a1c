"""The memory that a worker holds, however it is hidden, and what it cannot change of its standing unseen."""

from __future__ import annotations

import mmap
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.fill.linux.held import Held, HeldMemory, private_bytes
from megatron.fill.linux.proc import numbers
from megatron.fill.linux.procsettings import ProcSettings

MIB = 2**20


@pytest.fixture
def memory() -> Iterator[HeldMemory]:
    counted = HeldMemory(os.getpid())
    yield counted
    counted.close()


def grown(before: Held, after: Held) -> tuple[int, int]:
    """By how many MiB files and kernel memory have grown."""
    return (after.files - before.files) // MIB, (after.kernel - before.kernel) // MIB


def test_files_in_memory_count_though_nobody_has_mapped_them(memory):
    fd = os.memfd_create("hoard")
    try:
        before = memory.count([os.getpid()])
        os.write(fd, bytes(3 * MIB))
        assert grown(before, memory.count([os.getpid()]))[0] == 3
        assert memory.count([]) == Held(0, 0, 0, 0)
    finally:
        os.close(fd)


# Twice eight MiB, the first mapped three times: after the first line of its input, until the second.
MAPS = """
import mmap, os, sys
print(flush=True)
sys.stdin.readline()
for times in (3, 0):
    fd = os.memfd_create("hoard")
    os.ftruncate(fd, 8 << 20)
    os.posix_fallocate(fd, 0, 8 << 20)
    maps = [mmap.mmap(fd, 8 << 20, prot=mmap.PROT_READ) for _ in range(times)] or maps
for one in maps:
    assert one[:: mmap.PAGESIZE]
print(flush=True)
sys.stdin.readline()
"""


def test_a_file_that_is_mapped_many_times_hides_no_other(memory):
    """Each of the mappings counts for the kernel; the file counts once, and the other beside it."""
    with subprocess.Popen(
        [sys.executable, "-c", MAPS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        before = memory.exact_bytes([child.pid], memory.count([child.pid])) or 0
        child.stdin.write(b"\n")
        child.stdout.readline()
        found = memory.count([child.pid])
        if before:
            exact = memory.exact_bytes([child.pid], found) or 0
            assert 15 * MIB < exact - before < 18 * MIB
        assert found.likely_bytes <= found.most_bytes
        assert found.mapped >= 24 * MIB
        assert found.files >= 16 * MIB
        child.stdin.write(b"\n")


def test_one_process_holds_what_it_has_touched(tmp_path):
    before = private_bytes(os.getpid())
    with mmap.mmap(-1, 32 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:  # new, as malloc's may not be
        block.write(b"x" * (32 * MIB))
        assert private_bytes(os.getpid()) - before > 30 * MIB
    assert private_bytes(42, str(tmp_path)) == 0


def test_page_tables_count(memory):
    before = memory.count([os.getpid()])
    with mmap.mmap(-1, 1 << 32, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, prot=mmap.PROT_READ) as block:
        for at in range(0, 1 << 32, 2 * MIB):
            assert block[at] == 0
        after = memory.count([os.getpid()])
    assert grown(before, after)[1] >= 7  # a table of 4 KiB for each 2 MiB, of which the huge zero page spares some


@pytest.mark.parametrize(("make", "mib"), [("socket.socketpair()", 70), ("os.pipe()", 3)])
def test_what_many_buffers_can_hold_counts(make, mib):
    code = f"import os, socket, sys; kept = [{make} for _ in range(120)]; print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        memory = HeldMemory(worker.pid)
        found = memory.count([worker.pid])
        memory.close()
        worker.kill()
    assert found.kernel > mib * MIB


def test_few_of_them_are_free(memory):
    before = memory.count([os.getpid()])
    pairs = [socket.socketpair() for _ in range(3)]
    with select.epoll() as poll:
        for one, other in pairs:
            poll.register(one)
            poll.register(other)
        assert grown(before, memory.count([os.getpid()])) == (0, 0)
    for one, other in pairs:
        one.close()
        other.close()


def _process(proc: Path, pid: int, adjustment: int, nice: int) -> None:
    for name, text in ((str(pid), adjustment), ("self", None)):
        folder = proc / name
        folder.mkdir(parents=True, exist_ok=True)
        if text is not None:
            (folder / "oom_score_adj").write_text(f"{text}\n")
    (proc / "self/autogroup").write_text(f"/autogroup-7 nice {nice}\n")


def test_a_standing_that_was_changed_ends_the_worker_and_is_put_back(tmp_path):
    _process(tmp_path, 5, 1000, 0)
    standing = ProcSettings(5, str(tmp_path))
    assert standing.look([5, 6]) == ""
    _process(tmp_path, 6, 0, 0)
    assert standing.look([5, 6]) == "it changed its own standing: oom_score_adj of process 6 was 0, expected 1000"
    assert (tmp_path / "6/oom_score_adj").read_text() == "1000"
    _process(tmp_path, 5, 1000, 19)
    assert standing.look([5]) == "it changed its own standing: the nice value of its session was 19, expected 0"
    assert (tmp_path / "self/autogroup").read_text() == "0"
    (tmp_path / "self/autogroup").unlink()
    assert standing.look([5, 7]) == ""  # no autogroups, and a process that has ended


_REAL = """
import os, sys
sys.path[:] = {path!r}
from megatron.fill.linux.procsettings import ProcSettings
standing, said = ProcSettings(os.getpid()), []
def write(file, text):
    child = os.fork()
    if child == 0:
        with open("/proc/self/" + file, "w") as opened:
            opened.write(text)
        os.read(held, 1)
        os._exit(0)
    return child
held, go = os.pipe()
with open("/proc/self/oom_score_adj", "w") as own:
    own.write("500")
standing = ProcSettings(os.getpid())
for file, text in (("oom_score_adj", "499"), ("autogroup", "19")):
    child = write(file, text)
    while not (found := standing.look([os.getpid(), child])):
        pass
    print(found.replace(str(child), "CHILD"))
    print(standing.look([os.getpid(), child]) or "as before", flush=True)
    os.write(go, b"x")
    os.waitpid(child, 0)
"""


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="this kernel has no autogroups")
def test_it_is_put_back_in_the_real_proc():
    code = _REAL.format(path=sys.path)
    done = subprocess.run(
        [sys.executable, "-c", code], start_new_session=True, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.splitlines() == [
        "it changed its own standing: oom_score_adj of process CHILD was 499, expected 500",
        "as before",
        "it changed its own standing: the nice value of its session was 19, expected 0",
        "as before",
    ], done.stderr


def test_a_name_cannot_pretend_to_be_a_number_of_the_kernel_s(tmp_path):
    status = tmp_path / "status"
    status.write_bytes(b"Name:\ta\x0cVmPTE: 7\rThreads 8\x85b\nVmSwap:\t       4 kB\nanon 4096\nSeccomp:\n")
    assert numbers(status) == {"VmSwap": 4, "anon": 4096}
    assert numbers(tmp_path / "gone") == {}

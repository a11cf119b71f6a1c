"""What keeps a job in, seen from inside: each test puts a process there and has it try."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.fill.app.runfolder import make_run_folder
from megatron.fill.errors import ConfigError
from megatron.fill.linux.oom import OomLog
from megatron.fill.sandbox.config import Bind, Sandbox, parse_bind
from megatron.fill.sandbox.process import SandboxedProcess
from tests.support.sandboxed import GUEST, MIB, PROGRAM, Inside, needs


def test_this_machine_names_every_wall_and_what_it_lacks(support):
    names = [layer.name for layer in support.layers]
    assert names[:5] == ["processes", "files", "ipc", "control groups", "network"]
    assert all(layer.keeps for layer in support.layers)
    assert bool(support.lacking) == any(layer.lacks for layer in support.layers)


def test_no_process_outside_can_be_named(inside, support):
    needs(support, "pid")
    found = inside.run(
        """
print(json.dumps({
    "pids": sorted(int(name) for name in os.listdir("/proc") if name.isdigit()),
    "init": attempt(os.kill, 1, signal.SIGKILL),
    "stop": attempt(os.kill, 1, signal.SIGSTOP),
    "parent": os.getppid(),
    "all": attempt(os.kill, -1, signal.SIGCONT),
}))"""
    )
    assert found["pids"] == [1, 2]
    assert found["parent"] == 1
    if GUEST is not None:
        assert found["init"] == found["stop"] == "PermissionError"
    assert inside.code == 0  # the init was not stopped either


def test_files_are_read_only_but_for_the_job_s_own_folder(inside, support, tmp_path):
    needs(support, "mount")
    (tmp_path / "secret").write_text("of others in /tmp")
    found = inside.run(
        f"""
def write(path):
    with open(path, "w") as file:
        file.write("x")
os.chdir({str(inside.folder)!r})
print(json.dumps({{
    "own": attempt(write, "result"), "tmp": attempt(write, "/tmp/{tmp_path.name}"), "shm": attempt(write, "/dev/shm/x"),
    "null": attempt(write, "/dev/null"),
    "etc": attempt(write, "/etc/x"), "module": attempt(write, json.__file__), "here": attempt(write, "../x"),
    "link": attempt(os.rename, {str(inside.folder)!r}, {str(inside.folder)!r} + "-2"),
    "others": os.path.exists({str(tmp_path / "secret")!r}), "run": os.listdir("/run"),
    "groups": os.listdir("/sys/fs/cgroup") if os.path.isdir("/sys/fs/cgroup") else [],
    "terminal": attempt(write, "/dev/tty"), "disks": [n for n in os.listdir("/dev") if n[:2] in ("sd", "vd", "nv")],
    "switch": attempt(write, "/proc/sys/kernel/core_pattern"), "mount": attempt(os.chroot, "/tmp"),
}}))"""
    )
    assert [found[name] for name in ("own", "tmp", "shm", "null")] == ["done"] * 4
    refused = ("etc", "module", "here", "link", "terminal", "switch", "mount")
    assert {name: found[name] for name in refused if found[name] == "done"} == {}
    assert found["others"] is False
    assert found["groups"] == found["disks"] == []
    assert (inside.folder / "result").read_text() == "x"
    assert not Path("/tmp", tmp_path.name).exists()


@pytest.fixture
def run_folder() -> Iterator[Path]:
    """One that a job would see, since it is not below /tmp, with what a run and a training leave in it."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        run = Path(folder) / "project" / "run"
        make_run_folder(run)
        for name in ("agents/agent0.log", "output/other-2.log", "records/r", "tensorboard/events", "checkpoints/model"):
            (run / name).parent.mkdir(exist_ok=True)
            (run / name).write_text("secret")
        for job in ("own-1", "other-2"):
            (run / "jobs" / job).mkdir()
            (run / "jobs" / job / "result.json").write_text("{}")
            if GUEST is not None:
                os.chown(run / "jobs" / job, GUEST.uid, GUEST.gid)
        (run.parent / "module.py").touch()
        Path(folder).chmod(0o755)
        yield run


SEEN = """
found = [os.path.relpath(os.path.join(above, name), {run!r}) for above, _, names in os.walk({run!r}) for name in names]
writes = attempt(lambda: open({run!r} + "/jobs/own-1/new", "x"))
print(json.dumps({{"found": sorted(found), "writes": writes, "module": os.path.exists({run!r} + "/../module.py")}}))"""
EVERYTHING = [
    *("agents/agent0.log", "checkpoints/model", "jobs/other-2/result.json", "jobs/own-1/result.json"),
    *("output/other-2.log", "records/r", "tensorboard/events"),
]
OWN = ["jobs/own-1/result.json"]


@pytest.mark.parametrize("bound", ["", "above", "above, writable", "below", "the folder itself"])
def test_of_its_run_a_job_sees_its_own_folder_only(support, run_folder, bound):
    needs(support, "mount")
    binds = {
        "above": (Bind(str(run_folder.parent)),),
        "above, writable": (Bind(str(run_folder.parent), writable=True),),
        "below": (Bind(str(run_folder / "checkpoints")),),
        "the folder itself": (Bind(str(run_folder)),),
    }.get(bound, ())
    inside = Inside(run_folder / "jobs" / "own-1", support)
    found = inside.run(SEEN.format(run=str(run_folder)), binds=binds, runs=(str(run_folder),))
    besides = {"below": ["checkpoints/model"], "the folder itself": ["checkpoints/model", "tensorboard/events"]}
    assert found["found"] == sorted(OWN + besides.get(bound, []))
    assert (found["writes"], found["module"]) == ("done", True)


def test_without_that_wall_it_sees_what_its_user_may(support, run_folder):
    inside = Inside(run_folder / "jobs" / "own-1", support)
    found = inside.run(SEEN.format(run=str(run_folder)), runs=(str(run_folder),), without=("run folder",))
    private = [name for name in EVERYTHING if name.startswith("agents")] if GUEST is not None else []
    assert found["found"] == [name for name in EVERYTHING if name not in private]


def test_another_user_without_a_view_of_its_own_is_kept_out_by_modes(support, run_folder):
    if GUEST is None:
        pytest.skip("jobs are the training's own user")
    make_run_folder(run_folder, seen=True)
    inside = Inside(run_folder / "jobs" / "own-1", support)
    found = inside.run(SEEN.format(run=str(run_folder)), namespaces=())
    assert [name for name in found["found"] if name.split("/")[0] in ("agents", "records", "output", "locks")] == []


def test_a_run_folder_that_jobs_see_is_not_theirs_to_write_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        make_run_folder(tmp_path / "run", seen=True)
    finally:
        os.umask(before)
    folders = [tmp_path / "run", *(tmp_path / "run").iterdir()]
    assert [folder.name for folder in folders if folder.stat().st_mode & 0o022] == []


def test_a_place_that_is_bound_can_be_read_or_written(inside, support, tmp_path):
    needs(support, "mount")
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    out.mkdir()
    out.chmod(0o777)
    (data / "x").write_text("y")
    found = inside.run(
        f"""
print(json.dumps([
    open("{data}/x").read(), attempt(open, "{data}/new", "w"), attempt(open, "{out}/new", "w"),
]))""",
        binds=(Bind(str(data)), Bind(str(out), writable=True)),
    )
    assert found == ["y", "OSError", "done"]
    assert (out / "new").exists()


def test_a_masked_file_cannot_be_opened_wherever_it_lies(inside, support, tmp_path):
    if "mount" not in support.namespaces:
        pytest.skip("this machine gives no mount namespace")
    bound, names = tmp_path / "bound", ("store.db", "store.db-wal")
    bound.mkdir()
    for name in names:
        (bound / name).write_text("secret")
        (bound / name).chmod(0o666)
    files = [str(bound / name) for name in names]
    found = inside.run(
        f"print(json.dumps([attempt(open, path, mode) for path in {files!r} for mode in 'ra']))",
        binds=(Bind(str(bound), writable=True),),
        masked=(*files, str(bound / "not-there")),
    )
    assert found == ["PermissionError"] * 4
    assert (bound / "store.db").read_text() == "secret"


def test_a_job_s_folder_is_reached_though_one_above_it_is_closed_to_its_user(inside, support, tmp_path):
    needs(support, "mount")
    tmp_path.chmod(0o700)
    (tmp_path / "secret").write_text("not for jobs")
    found = inside.run(
        f"""
os.chdir({str(inside.folder)!r})
open("x", "w").close()
print(json.dumps([os.getcwd(), os.path.exists({str(tmp_path / "secret")!r})]))""",
        binds=(Bind(str(tmp_path)),),
    )
    assert found == [str(inside.folder), GUEST is None]


def test_its_files_in_memory_have_one_limit(inside, support):
    needs(support, "mount")
    found = inside.run(
        """
def fill(path):
    with open(path, "wb", buffering=0) as file:
        for _ in range(64):
            file.write(bytes(1 << 20))
print(json.dumps([attempt(fill, "/tmp/a"), attempt(fill, "/dev/shm/b"), os.statvfs("/tmp").f_bavail]))""",
        memory_files_bytes=32 * MIB,
    )
    assert found == ["OSError", "OSError", 0]


def test_there_is_no_network_but_its_own(inside, support):
    needs(support, "net")
    server = subprocess.Popen(
        [sys.executable, "-c", "import socket; s = socket.create_server(('127.0.0.1', 0));"
         "print(s.getsockname()[1], flush=True); s.accept()"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        connect = f"attempt(socket.create_connection, ('127.0.0.1', {port}), 5)"
        own = "here = socket.create_server(('127.0.0.1', 0)); socket.create_connection(here.getsockname(), 5)"
        assert inside.run(f"{own}\nprint(json.dumps({connect}))") == "ConnectionRefusedError"
        assert inside.run(f"print(json.dumps({connect}))", network=True) == "done"
    finally:
        server.kill()
        server.wait()


REFUSED = """
at, FUTEX2 = ctypes.byref(ctypes.c_uint32()), (449, 454, 455, 456)
print(json.dumps({
    "prlimit of another": raw(302, 1, 7, None, None), "prlimit of itself": raw(302, 0, 7, None, None),
    "setsid": attempt(os.setsid), "setpgid": attempt(os.setpgid, 0, 0),
    "scheduler": attempt(os.sched_setscheduler, 0, os.SCHED_IDLE, os.sched_param(0)),
    "real time": attempt(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1)),
    "affinity": attempt(os.sched_setaffinity, 0, [0]), "nice": attempt(os.nice, 1),
    "unshare": attempt(os.unshare, os.CLONE_NEWUSER), "clone": raw(56, os.CLONE_NEWUSER, 0, 0, 0, 0),
    "clone3": raw(435, None, 0), "ptrace": raw(101, 0, 0, 0, 0), "bpf": raw(321, 0, None, 0),
    "perf": raw(298, None, 0, -1, -1, 0), "userfaultfd": raw(323, 0), "keyring": raw(250, 0, -3, 0),
    "io_uring": raw(425, 1, None), "memory of others": raw(310, 1, None, 0, None, 0, 0),
    "terminal": raw(16, 0, ctypes.c_long(0x540A | 1 << 32), 0), "pidfd": raw(438, 0, 0, 0),
    "packets": attempt(socket.socket, 17, socket.SOCK_RAW), "vsock": attempt(socket.socket, 40, socket.SOCK_STREAM),
    "pairs": [raw(53, family, 1, 0, (ctypes.c_int * 2)()) for family in (*range(3, 10), *range(11, 16), 17, 30, 40)],
    "requeue": [raw(202, at, how, 0, None, at, 0) for how in (3, 4, 12)], "futex2": [raw(n, None) for n in FUTEX2],
    "requeue within": raw(202, at, 3 | 128, 0, None, at, 0),
    "unix": attempt(socket.socket, socket.AF_UNIX), "thread": len(start_threads()),
}))"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of the system calls are x86-64's")
def test_system_calls_that_reach_beyond_a_job_are_refused(inside, support):
    if any(layer.name == "system calls" for layer in support.lacking):
        pytest.skip("this machine has no libseccomp.so.2")
    threads = "import threading\ndef start_threads():\n    one = threading.Thread(target=print, kwargs={'end': ''})\n"
    found = inside.run(f"{threads}    one.start(); one.join(); return [one]\n{REFUSED.strip()}")
    assert found.pop("prlimit of itself") == found.pop("unix") == found.pop("requeue within") == "done"
    assert set(found.pop("requeue") + found.pop("futex2")) == {"ENOSYS"}
    assert set(found.pop("pairs")) == {"EAFNOSUPPORT"}  # also of kinds whose module the kernel would load
    assert found.pop("thread") == 1
    assert found.pop("clone3") == "ENOSYS"  # so that C libraries take clone
    assert found.pop("vsock") == found.pop("packets") == "OSError"
    assert set(found.values()) == {"EPERM", "PermissionError"}, found


def test_there_is_no_way_back_to_power(inside):
    found = inside.run(
        """
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
again = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (2048, 2048))"
print(json.dumps({
    "user": os.getuid(), "powers": [status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")],
    "new": status["NoNewPrivs"], "seccomp": status["Seccomp"], "root": attempt(os.setuid, 0),
    "raise": attempt(resource.setrlimit, resource.RLIMIT_DATA, (-1, -1)),
    "starts": subprocess.run([sys.executable, "-c", again], stderr=-3).returncode,
    "limits": [resource.getrlimit(which) for which in (
        resource.RLIMIT_DATA, resource.RLIMIT_NOFILE, resource.RLIMIT_CORE, resource.RLIMIT_RTPRIO, resource.RLIMIT_NICE
    )],
    "oom": int(open("/proc/self/oom_score_adj").read()),
}))""",
        prepare=f"limit_resources({512 * MIB}, 4096, 128)",
    )
    assert found["user"] != 0
    none = f"{0:016x}"
    assert found["powers"][:3] + found["powers"][4:] == [none] * 4
    if GUEST is not None:
        assert found["powers"][3] == none
    assert (found["new"], found["seccomp"]) == ("1", "2")
    assert found["raise"] == "ValueError"
    assert found["root"] == "PermissionError"
    assert found["starts"] == 1
    assert found["limits"] == [[512 * MIB] * 2, [128] * 2, [0, 0], [0, 0], [0, 0]]
    assert found["oom"] == 1000


def test_an_allocation_over_the_cap_fails(inside):
    body = """
try:
    block = bytearray(600 << 20)
    print(json.dumps("done"))
except MemoryError:
    print(json.dumps("MemoryError"))"""
    assert inside.run(body, prepare=f"limit_resources({512 * MIB}, 4096, 128)") == "MemoryError"


def test_the_limit_on_tasks_leaves_other_jobs_of_the_user_theirs(inside, support):
    needs(support, "pid")  # else it counts those of the machine's user
    body = """
import threading
end = threading.Event()
try:
    for count in range(1000):
        threading.Thread(target=end.wait).start()
except RuntimeError:
    print(json.dumps(count))
end.set()"""
    user = GUEST.uid if GUEST else os.getuid()
    assert 8 * 8 < inside.run(body, prepare=f"limit_resources(None, most_tasks({user}, 8), 128)") < 999


@pytest.mark.parametrize("end", ["os._exit(7)", "os.kill(os.getpid(), signal.SIGKILL)", "ctypes.string_at(0)"])
def test_how_the_job_ended_is_told(inside, end):
    inside.run(f"print(json.dumps(0), flush=True)\n{end}")
    assert inside.code == {"_": 7, "k": 100 + signal.SIGKILL, "s": 100 + signal.SIGSEGV}[end.split(".")[1][0]]


def test_nothing_inside_outlives_its_holder(folder, support):
    needs(support, "pid")
    sandbox = Sandbox(support.namespaces, str(folder))
    body = "subprocess.Popen(['sleep', '87654']); print(held_by, flush=True); signal.pause()"
    program = PROGRAM.format(body=body, sandbox=sandbox, prepare="[]", become="").replace("held_by", "os.getpid()")
    holder = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "2\n"
    assert b"87654" in _all_commands()
    holder.kill()
    holder.wait()
    assert holder.stdout.read() == ""  # the pipe is closed only when the last of them has ended
    assert b"87654" not in _all_commands()


def _all_commands() -> bytes:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes())
        except OSError:  # it has ended
            continue
    return b"\n".join(found)


def test_without_any_namespace_the_other_walls_stand(inside, support):
    """As in a container that refuses them all."""
    os.chown(inside.folder, os.getuid(), os.getgid())
    outside = subprocess.Popen(["sleep", "60"])
    try:
        found = inside.run(
            f"""
print(json.dumps({{
    "own": attempt(open, {str(inside.folder / "x")!r}, "w"), "etc": attempt(open, "/etc/x", "w"),
    "signal": attempt(os.kill, {outside.pid}, signal.SIGCONT), "memory": attempt(open, "/proc/{outside.pid}/mem"),
    "tcp": attempt(socket.create_connection, ("127.0.0.1", 1), 5),
}}))""",
            namespaces=(),
            user=None,
            group=None,
        )
    finally:
        outside.kill()
        outside.wait()
    assert found["own"] == "done"
    assert found["etc"] == found["signal"] == found["memory"] == "PermissionError"
    landlock = next(layer for layer in support.layers if layer.name == "landlock")
    assert found["tcp"] == "PermissionError" or landlock.lacks


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data", "--fill-bind data: expected an absolute path"),
        ("/no/such/place:rw", "there is no /no/such/place"),
        ("/:rw", "not the whole machine"),
    ],
)
def test_wrong_binds_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_bind(text)


def test_binds_are_read(tmp_path):
    odd = tmp_path / "a:b"
    odd.mkdir()
    assert parse_bind(str(tmp_path)) == Bind(str(tmp_path))
    assert parse_bind(f"{tmp_path}:rw") == Bind(str(tmp_path), writable=True)
    assert parse_bind(str(odd)) == Bind(str(odd))


def test_the_kernel_s_log_names_the_victim(tmp_path):
    log, counters = tmp_path / "kmsg", tmp_path / "vmstat"
    log.write_text("")
    counters.write_text("oom_kill 3\n")
    watch = OomLog(log, counters)
    assert watch.explain({41, 42}) == ""
    log.write_text("4,1,2,-;Memory cgroup out of memory: Killed process 42 (python) total-vm:8kB\n SUBSYSTEM=memory\n")
    assert "Killed process 42 (python)" in watch.explain({41, 42})
    watch.close()


def test_another_process_s_end_is_not_the_worker_s(tmp_path):
    log = tmp_path / "kmsg"
    log.write_text("")
    watch = OomLog(log, tmp_path / "none")
    log.write_text("4,1,2,-;Out of memory: Killed process 7 (python)\n")
    assert watch.explain({42}) == ""
    watch.close()


def test_without_the_log_the_count_is_evidence(tmp_path):
    counters = tmp_path / "vmstat"
    counters.write_text("nr_free_pages 5\noom_kill 3\n")
    watch = OomLog(tmp_path / "none", counters)
    assert watch.explain({42}) == ""
    counters.write_text("nr_free_pages 5\noom_kill 4\n")
    assert "most likely this worker" in watch.explain({42})
    watch.close()


_UNCOUNTED = """
import mmap
libc = ctypes.CDLL(None, use_errno=True)
def shared(*arguments):
    mmap.mmap(*arguments).close()
def device():
    with open("/dev/zero", "rb") as file:
        shared(file.fileno(), 1 << 20, mmap.MAP_SHARED, mmap.PROT_READ)
read, write = os.pipe()
one, other = socket.socketpair()
size = one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size // 4)
import fcntl
print(json.dumps({
    "refused": {
        "segment": raw(29, 0, 4096, 0o600), "semaphores": raw(64, 0, 1, 0o600), "messages": raw(68, 0, 0o600),
        "memfd_create": raw(319, b"x", 0), "memfd_secret": raw(447, 0), "vmsplice": raw(278, write, None, 0, 0),
        "io_setup": raw(206, 1, None), "inotify": raw(294, 0),
        "anonymous": attempt(shared, -1, 4096), "pipe": attempt(fcntl.fcntl, write, 1031, 1 << 20),
        "hidden": raw(157, 4, 0, 0, 0, 0), "half a core": raw(157, 62, 1, 0, 0, None),
    },
    "private": attempt(shared, -1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS),
    "buffer": one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == size,
    "zeros": open("/dev/zero", "rb").read(5).hex(), "mapped": attempt(device), "device": os.stat("/dev/zero").st_rdev,
    "tcp": open("/proc/sys/net/ipv4/tcp_rmem").read().split()[-1],
}))"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of the system calls are x86-64's")
def test_memory_that_nobody_can_count_is_refused(inside, support):
    needs(support, "mount", "net")
    found = inside.run(_UNCOUNTED)
    assert set(found.pop("refused").values()) == {"ENOSYS", "EPERM", "PermissionError"}
    assert found == {
        "private": "done",
        "buffer": True,
        "zeros": 5 * "00",
        "mapped": "done",
        "device": 0,
        "tcp": "212992",
    }


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of the system calls are x86-64's")
def test_with_that_wall_left_out_it_is_there(inside):
    """The control."""
    refused = inside.run(_UNCOUNTED, without=("uncounted memory",))["refused"]
    through = ("segment", "semaphores", "messages", "memfd_create", "inotify", "anonymous", "pipe", "hidden")
    assert {refused[name] for name in through} == {"done"}


def test_a_job_on_a_gpu_keeps_the_memory_that_its_driver_shares(inside):
    body = "import mmap\nprint(json.dumps([attempt(mmap.mmap, -1, 4096), attempt(os.memfd_create, 'x')]))"
    assert inside.run(body, devices=("/dev/full",)) == ["done", "done"]


def test_it_is_known_when_a_job_has_stopped():
    job = subprocess.Popen(["sleep", "60"])
    held = SandboxedProcess.__new__(SandboxedProcess)  # waiting needs no sandbox, only the pid
    held.pid = job.pid
    assert not held.await_stop(0.01)
    job.send_signal(signal.SIGSTOP)
    assert held.await_stop(60)
    job.kill()
    assert held.await_stop(60)
    job.wait()

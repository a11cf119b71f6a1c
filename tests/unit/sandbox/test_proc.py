"""What a job may change of itself and of others through ``/proc``, tried from inside."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from megatron.fill.sandbox.config import Sandbox
from megatron.fill.sandbox.probe import SandboxSupport

_OPEN_ALL = """
def write(path):
    os.close(os.open(path, os.O_WRONLY))
import threading
held = threading.Event()
other = threading.Thread(target=held.wait)
other.start()
child = subprocess.Popen(["sleep", "9"])
found = {"opened": [], "refused": []}
for place in ("self", f"self/task/{other.native_id}", str(child.pid), f"{child.pid}/task/{child.pid}"):
    for folder, _, files in os.walk(f"/proc/{place}"):
        if folder.split("/")[-1] in ("task", "fd", "fdinfo", "map_files", "ns", "cwd", "root", "net"):
            continue
        for path in (f"{folder}/{name}" for name in files):
            if os.path.islink(path) or not os.stat(path).st_mode & 0o222:
                continue
            came = "opened" if attempt(write, path) == "done" else "refused"
            found[came].append(path.split("/")[-1])
child.kill()
held.set()
print(json.dumps({came: sorted(set(names)) for came, names in found.items()}))"""
_STANDING = {"oom_score_adj", "oom_adj", "coredump_filter", "clear_refs", "mem"}


def _namespaces(support: SandboxSupport, kind: str) -> tuple[str, ...]:
    """Those of a machine that gives all of them, all but that of processes, or none."""
    if kind == "none":
        return ()
    if "mount" not in support.namespaces:
        pytest.skip("this machine gives no mount namespace")
    return tuple(name for name in support.namespaces if kind == "all" or name != "pid")


@pytest.mark.parametrize(
    ("kind", "without"),
    [("all", ()), ("all", ("landlock",)), ("no pid", ()), ("no pid", ("landlock",)), ("none", ())],
)
def test_nothing_of_a_process_can_be_written_in_proc(inside, support, kind, without):
    found = inside.run(_OPEN_ALL, namespaces=_namespaces(support, kind), without=without)
    assert found["opened"] == []
    assert set(found["refused"]) >= _STANDING


@pytest.mark.parametrize("kind", ["all", "none"])
def test_with_that_wall_left_out_it_can(inside, support, kind):
    """The control: what is refused above would otherwise go through."""
    found = inside.run(_OPEN_ALL, namespaces=_namespaces(support, kind), without=("proc",))
    assert set(found["opened"]) >= {*_STANDING, "comm"}


def test_a_job_is_the_first_to_be_ended_and_cannot_change_that(inside, support):
    found = inside.run(
        """
def stay():
    open("/proc/self/oom_score_adj", "w").write("0")
print(json.dumps([attempt(stay), int(open("/proc/self/oom_score_adj").read())]))"""
    )
    assert found == ["OSError" if "mount" in support.namespaces else "PermissionError", 1000]


_MEASURE = """
meter = sys.modules["megatron.fill.device.meter"].HostMeter()
meter.start()
block = b"x" * (64 << 20)
first = meter.stop()[1]
del block
meter.start()
print(json.dumps([first, meter.stop()[1]]))"""


@pytest.mark.parametrize("kind", ["all", "no pid", "none"])
def test_the_peak_of_a_step_is_measured_all_the_same(inside, support, kind):
    found = inside.run(
        _MEASURE,
        prepare="__import__('megatron.fill.device.meter')",  # its user may not be able to read the files of it
        namespaces=_namespaces(support, kind),
    )
    assert found[0] - found[1] > 60 << 20


def test_a_wall_of_an_unknown_name_cannot_be_left_out():
    with pytest.raises(ValueError, match="'moat'"):
        Sandbox(without=("moat",))


_NAME_THREADS = """
def rename(path):
    with open(path, "w") as file:
        file.write("renamed")
import threading
held = threading.Event()
other = threading.Thread(target=held.wait)
other.start()
child = subprocess.Popen(["sleep", "9"])
own, temporary = f"/proc/self/task/{other.native_id}", f"/tmp/test-sandbox-{os.getpid()}"
found = {
    "own": attempt(rename, own + "/comm"), "name": open(own + "/comm").read(),
    "by number": attempt(rename, f"/proc/{os.getpid()}/task/{os.getpid()}/comm"),
    "in a program": subprocess.run(["sh", "-c", "echo itself > /proc/self/task/$$/comm"], stderr=-3).returncode,
    "own folder": attempt(rename, os.getcwd() + "/written"), "tmp": attempt(rename, temporary),
    "of another": attempt(rename, f"/proc/self/task/{child.pid}/comm"),
    "of another by number": attempt(rename, f"/proc/{child.pid}/task/{child.pid}/comm"),
    "of its init": attempt(rename, f"/proc/{os.getppid()}/task/{os.getppid()}/comm"),
    "beside it": attempt(rename, own + "/comm/../../oom_score_adj"), "stay": attempt(rename, own + "/oom_score_adj"),
    "no thread": attempt(rename, "/proc/self/task/" + 40 * "9" + "/comm"), "elsewhere": attempt(rename, "/etc/comm"),
}
os.unlink(temporary)
child.kill()
held.set()
print(json.dumps(found))"""
_MAY = ("own", "by number", "in a program", "own folder", "tmp")


def _open_above(folder: Path) -> None:
    """Let everybody pass through the folders that pytest has made, however many these are."""
    for closed in folder.parents[1:]:
        if closed == Path(tempfile.gettempdir()):
            return
        closed.chmod(0o755)


@pytest.mark.parametrize("same_user", [False, True])
@pytest.mark.parametrize("kind", ["all", "no pid", "none"])
def test_a_job_on_a_gpu_names_its_own_threads_and_writes_nothing_else_in_proc(inside, support, kind, same_user):
    user = {"user": None, "group": None} if same_user else {}
    options = {"namespaces": _namespaces(support, kind), "devices": ("/dev/full",), **user}
    if same_user:
        os.chown(inside.folder, os.getuid(), os.getgid())
    elif kind == "none":
        _open_above(inside.folder)  # what the view would put in its place
    prepare = f"os.chdir({str(inside.folder)!r})"
    found = inside.run(_NAME_THREADS, prepare=prepare, **options)
    assert found.pop("name") == "renamed\n"
    assert {found.pop(name) for name in _MAY} <= {"done", 0}
    assert "done" not in found.values(), found
    assert inside.run(_OPEN_ALL, **options)["opened"] == ["comm"]


_A_USER = 12345
# Its interpreter may lie where this user cannot read: what the body needs is imported before.
_BECOME = f"""
import encodings.ascii, encodings.idna, threading, megatron.fill.device.meter
os.setgroups([])
os.setresgid({_A_USER}, {_A_USER}, {_A_USER})
os.setresuid({_A_USER}, {_A_USER}, {_A_USER})
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user")
@pytest.mark.parametrize("devices", [(), ("/dev/full",)])
@pytest.mark.parametrize("kind", ["all", "none"])
def test_the_training_of_a_user_without_rights_keeps_its_jobs_in_as_well(inside, support, kind, devices):
    if kind == "all" and Path("/proc/sys/user/max_user_namespaces").read_text().strip() == "0":
        pytest.skip("this machine gives users no namespaces")
    names = _namespaces(support, kind)
    os.chown(inside.folder, _A_USER, _A_USER)
    _open_above(inside.folder)
    options = {"namespaces": ("user", *names) if names else (), "user": None, "group": None, "devices": devices}
    prepare = f"os.chdir({str(inside.folder)!r})"
    said = inside.run(_NAME_THREADS, prepare=prepare, become=_BECOME, **options)
    assert said["own folder"] == said["tmp"] == "done"
    assert (said["own"] == "done") is bool(devices)
    assert inside.run(_OPEN_ALL, become=_BECOME, **options)["opened"] == (["comm"] if devices else [])
    assert inside.run(_MEASURE, become=_BECOME, **options)[0] > 60 << 20


def test_without_a_gpu_it_does_not(inside):
    found = inside.run(_NAME_THREADS, prepare=f"os.chdir({str(inside.folder)!r})")
    assert found["own"] == "OSError"

"""What a job may change of itself and of others through ``/proc``, tried from inside."""

from __future__ import annotations

import pytest

from megatron.fill.sandbox import Cage, Walls

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


def _namespaces(walls: Walls, kind: str) -> tuple[str, ...]:
    """Those of a machine that gives all of them, all but that of processes, or none."""
    if kind == "none":
        return ()
    if "mount" not in walls.namespaces:
        pytest.skip("this machine gives no mount namespace")
    return tuple(name for name in walls.namespaces if kind == "all" or name != "pid")


@pytest.mark.parametrize(
    ("kind", "without"),
    [("all", ()), ("all", ("landlock",)), ("no pid", ()), ("no pid", ("landlock",)), ("none", ())],
)
def test_nothing_of_a_process_can_be_written_in_proc(inside, walls, kind, without):
    found = inside.run(_OPEN_ALL, namespaces=_namespaces(walls, kind), without=without)
    assert found["opened"] == []
    assert set(found["refused"]) >= _STANDING


@pytest.mark.parametrize("kind", ["all", "none"])
def test_with_that_wall_left_out_it_can(inside, walls, kind):
    """The control: what is refused above would otherwise go through."""
    found = inside.run(_OPEN_ALL, namespaces=_namespaces(walls, kind), without=("proc",))
    assert set(found["opened"]) >= {*_STANDING, "comm"}


def test_a_job_is_the_first_to_be_ended_and_cannot_change_that(inside, walls):
    found = inside.run(
        """
def stay():
    open("/proc/self/oom_score_adj", "w").write("0")
print(json.dumps([attempt(stay), int(open("/proc/self/oom_score_adj").read())]))"""
    )
    assert found == ["OSError" if "mount" in walls.namespaces else "PermissionError", 1000]


@pytest.mark.parametrize("kind", ["all", "no pid", "none"])
def test_the_peak_of_a_step_is_measured_all_the_same(inside, walls, kind):
    found = inside.run(
        """
meter = sys.modules["megatron.fill.device.meter"].HostMeter()
meter.start()
block = b"x" * (64 << 20)
first = meter.stop()[1]
del block
meter.start()
print(json.dumps([first, meter.stop()[1]]))""",
        prepare="__import__('megatron.fill.device.meter')",  # its user may not be able to read the files of it
        namespaces=_namespaces(walls, kind),
    )
    assert found[0] - found[1] > 60 << 20


def test_a_wall_of_an_unknown_name_cannot_be_left_out():
    with pytest.raises(ValueError, match="'moat'"):
        Cage(without=("moat",))

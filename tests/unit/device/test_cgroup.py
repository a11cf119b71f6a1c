"""Where a worker's control group may be made, and what is written to it: in a pretended tree, and in the real one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.fill.device.cpu import CpuDevice, HostLimiter
from megatron.fill.device.port import Limits
from megatron.fill.linux.cgroup import Cgroup, CgroupHome, find_home, memory_groups

MIB = 2**20


class Tree:
    """A pretended hierarchy and a pretended /proc."""

    def __init__(self, folder: Path) -> None:
        self.mount = folder / "sys fs cgroup".replace(" ", "-")
        self.proc = folder / "proc"
        (self.proc / "self").mkdir(parents=True)
        self.group("", root=True)
        line = f"30 23 0:26 / {self.mount} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
        (self.proc / "self/mountinfo").write_text("29 1 0:1 / / rw - ext4 /dev/vda rw\n" + line)
        self.own("/")

    def group(self, path: str, hands_down: str = "", root: bool = False) -> Path:
        folder = self.mount / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cgroup.procs").write_text("")
        (folder / "cgroup.subtree_control").write_text(hands_down)
        if not root:
            (folder / "cgroup.type").write_text("domain\n")
        return folder

    def own(self, path: str) -> None:
        (self.proc / "self/cgroup").write_text(f"5:memory:/legacy\n0::{path}\n")

    def leaf(self, path: str) -> Path:
        """A worker's group as the kernel makes it: with its files."""
        folder = self.mount / path
        folder.mkdir()
        names = ("cgroup.procs", "cgroup.kill", "memory.oom.group", "memory.swap.max", "cpu.idle")
        for name in names:
            (folder / name).write_text("")
        return folder


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def find(tree: Tree, systemd: bool = False, delegated: tuple[Path, ...] = ()) -> CgroupHome:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getxattr", lambda place, name: b"1" if place in delegated else b"0")
        return find_home(tree.proc, systemd)


def test_the_root_may_hand_controllers_down(tree):
    tree.group("", "cpu memory pids\n", root=True)
    home = find(tree)
    assert home == CgroupHome(tree.mount, frozenset({"cpu", "memory", "pids"}))
    assert home.binds_memory
    assert home.binds_processes


def test_the_hybrid_layout_can_only_kill(tree):
    home = find(tree)
    assert home.path == tree.mount
    assert not home.binds_memory
    assert home.why == "the root group does not hand down memory and pids"


def test_under_a_user_s_systemd_the_worker_is_a_sibling(tree):
    slices = tree.group("user.slice", "memory pids")
    manager = tree.group("user.slice/user@1000.service", "memory pids")
    apps = tree.group("user.slice/user@1000.service/app.slice", "memory pids")
    tree.group("user.slice/user@1000.service/app.slice/run-1.scope")
    tree.own("/user.slice/user@1000.service/app.slice/run-1.scope")
    assert find(tree, systemd=True, delegated=(manager,)).path == apps
    assert slices.exists()


def test_a_delegated_scope_cannot_bind_memory_while_it_holds_processes(tree):
    tree.group("system.slice", "memory pids")
    scope = tree.group("system.slice/run-1.scope")
    tree.own("/system.slice/run-1.scope")
    home = find(tree, systemd=True, delegated=(scope,))
    assert home.path == scope
    assert home.why == "a group that holds processes cannot hand down memory and pids"


def test_what_systemd_did_not_delegate_is_left_alone(tree):
    tree.group("system.slice", "memory pids")
    tree.group("system.slice/sshd.service")
    tree.own("/system.slice/sshd.service")
    home = find(tree, systemd=True)
    assert home.path is None
    assert "Delegate=yes" in home.why


def test_a_container_s_group_can_only_kill(tree):
    (tree.mount / "cgroup.type").write_text("domain\n")  # it looks like the root, and is not
    home = find(tree)
    assert home.path == tree.mount
    assert not home.binds_memory


def test_without_a_mount_there_is_no_home(tree):
    (tree.proc / "self/mountinfo").write_text("")
    assert find(tree).why == "cgroup v2 is not mounted"


def test_a_group_outside_of_the_namespace_is_no_home(tree):
    tree.own("/../other")
    assert "outside" in find(tree).why


def test_what_cannot_be_written_to_is_no_home(tree, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    home = find(tree)
    assert home.path is None
    assert "not writable" in home.why


def test_limits_are_written(tree):
    leaf = tree.leaf("pipefill-job-1")
    home = CgroupHome(tree.mount, frozenset({"memory", "pids", "cpu"}))
    group = Cgroup(home, "job-1", 64 * MIB, 32)
    written = {path.name: path.read_text() for path in leaf.iterdir() if path.read_text()}
    assert written == {
        "memory.max": str(64 * MIB),
        "memory.swap.max": "0",
        "memory.oom.group": "1",
        "pids.max": "32",
        "cpu.idle": "1",
    }
    assert group.binds_memory


def test_no_cap_is_written_as_max(tree):
    leaf = tree.leaf("pipefill-job-1")
    group = Cgroup(CgroupHome(tree.mount, frozenset({"memory"})), "job-1", None, 32)
    assert (leaf / "memory.max").read_text() == "max"
    assert not group.binds_memory


def test_an_old_kernel_s_cpu_controller_gives_the_least_weight(tree):
    leaf = tree.leaf("pipefill-job-1")
    (leaf / "cpu.idle").unlink()
    Cgroup(CgroupHome(tree.mount, frozenset({"cpu"})), "job-1", None, 32)
    assert (leaf / "cpu.weight").read_text() == "1"


def test_events_and_sizes_are_read(tree):
    leaf = tree.leaf("pipefill-job-1")
    group = Cgroup(CgroupHome(tree.mount), "job-1", MIB, 32)
    assert (group.held_bytes(), group.peak_bytes(), group.memory_kills(), group.refused_forks()) == (0, 0, 0, 0)
    (leaf / "memory.stat").write_text("anon 12000\nfile 9999\nanon_thp 7\nshmem 345\n")
    (leaf / "memory.peak").write_text("23456\n")
    (leaf / "memory.events").write_text("low 0\noom 2\noom_kill 1\noom_group_kill 1\n")
    (leaf / "pids.events").write_text("max 7\n")
    assert (group.held_bytes(), group.peak_bytes(), group.memory_kills(), group.refused_forks()) == (12345, 23456, 1, 7)


def test_what_a_killed_agent_left_is_removed(tree):
    old, new, other = (tree.mount / name for name in ("pipefill-old", "pipefill-new", "somebody-s"))
    for folder in (old, new, other):
        folder.mkdir()
    for folder in (old, other):
        os.utime(folder, (1, 1))
    group = Cgroup(CgroupHome(tree.mount), "job-1", None, 1)
    assert sorted(path.name for path in tree.mount.iterdir() if path.is_dir()) == [
        "pipefill-job-1",
        "pipefill-new",
        "somebody-s",
    ]
    group.close()


def test_the_free_memory_is_that_of_the_container(tree):
    job = tree.group("job")
    tree.group("job/step")
    tree.own("/job/step")
    (job / "memory.max").write_text(f"{64 * MIB}\n")
    (job / "memory.current").write_text(f"{50 * MIB}\n")
    (job / "memory.stat").write_text(f"inactive_file {20 * MIB}\n")
    (job / "step/memory.max").write_text("max\n")
    groups = memory_groups(tree.proc)
    assert [group.path for group in groups] == [job / "step", job]
    device = CpuDevice(CgroupHome(None), groups)
    assert device.free_bytes() == 34 * MIB
    (job / "memory.current").write_text(f"{90 * MIB}\n")
    assert device.free_bytes() == 0
    (job / "memory.max").write_text("max\n")  # lifted, and another one set
    (job / "step/memory.max").write_text(f"{16 * MIB}\n")
    assert device.free_bytes() == 16 * MIB
    (tree.proc / "self/mountinfo").write_text("")
    assert memory_groups(tree.proc) == []


@pytest.mark.parametrize("mounted", ["/", "/batch"])
def test_groups_of_version_1_limit_it_too(tree, mounted):
    legacy = tree.mount.parent / "legacy"
    with (tree.proc / "self/mountinfo").open("a") as file:
        file.write(f"32 31 0:29 / {legacy}/cpu rw - cgroup cgroup rw,cpu,cpuacct\n")
        file.write(f"33 31 0:30 {mounted} {legacy}/memory rw - cgroup cgroup rw,memory\n")
    (tree.proc / "self/cgroup").write_text("5:cpu,cpuacct:/\n4:memory:/batch/job\n0::/\n")
    above = legacy / "memory" / ("" if mounted == "/batch" else "batch")
    for folder, limit, used in ((above, 300 * MIB, 250 * MIB), (above / "job", 0x7FFFFFFFFFFFF000, 200 * MIB)):
        folder.mkdir(parents=True)
        (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"inactive_file 0\ntotal_inactive_file {10 * MIB}\n")
    device = CpuDevice(CgroupHome(None), memory_groups(tree.proc))
    assert device.free_bytes() == 60 * MIB
    # A limit above what can be seen from here is told as the group's own.
    (above / "job/memory.stat").write_text(f"hierarchical_memory_limit {220 * MIB}\n")
    assert device.free_bytes() == 20 * MIB


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"], process_group=0)
    yield process
    process.kill()
    process.wait()


def test_the_kernel_s_verdict_is_passed_on(tree, worker):
    leaf = tree.leaf("pipefill-job-1")
    limiter = HostLimiter(Limits(64 * MIB, 32), "job-1", CgroupHome(tree.mount, frozenset({"memory", "pids"})))
    limiter.adopt(worker.pid)
    assert (leaf / "cgroup.procs").read_text() == str(worker.pid)
    (leaf / "memory.stat").write_text(f"anon {60 * MIB}\nshmem 0\n")
    assert limiter.look() == ""
    assert limiter.held_bytes == limiter.peak_bytes == 60 * MIB
    (leaf / "memory.peak").write_text(str(64 * MIB))
    (leaf / "memory.events").write_text("oom_kill 1\n")
    assert limiter.look() == "over its cap of 64 MiB: the kernel ended it, with a peak of 64 MiB"
    assert limiter.explain() == limiter.look()
    limiter.kill()
    assert (leaf / "cgroup.kill").read_text() == "1"
    assert worker.wait(60) == -9
    limiter.close()


def test_a_refused_fork_is_too_many_processes(tree, worker):
    leaf = tree.leaf("pipefill-job-1")
    limiter = HostLimiter(Limits(None, 32), "job-1", CgroupHome(tree.mount, frozenset({"pids"})))
    limiter.adopt(worker.pid)
    (leaf / "pids.events").write_text("max 1\n")
    assert limiter.look().startswith("over its limit of 32 processes and threads")
    limiter.kill()
    limiter.close()


def test_a_group_that_cannot_be_joined_is_done_without(tree, worker):
    leaf = tree.leaf("pipefill-job-1")
    (leaf / "cgroup.procs").unlink()
    limiter = HostLimiter(Limits(64 * MIB, 32), "job-1", CgroupHome(tree.mount, frozenset({"memory"})))
    limiter.adopt(worker.pid)
    assert limiter.look() == ""
    assert 0 < limiter.held_bytes < 64 * MIB
    limiter.kill()
    assert worker.wait(60) == -9
    limiter.close()


def test_the_kernel_ends_a_real_group_at_once():
    home = find_home()
    if home.path is None:
        pytest.skip(f"no control groups: {home.why}")
    group = Cgroup(home, f"test-{os.getpid()}", None, 64)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        assert group.add(process.pid)
        assert group.processes() == [process.pid]
        assert group.freeze()
        assert group.kill()
        assert process.wait(60) == -9
    finally:
        process.kill()
        process.wait()
        group.close()
    assert not group.path.exists()

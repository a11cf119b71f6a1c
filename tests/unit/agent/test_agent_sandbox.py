"""Whom jobs run as, which layers of the sandbox are said to stand, and what is said to do about those that do not."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from megatron.fill.agent import sandbox
from megatron.fill.agent.sandbox import find_support
from megatron.fill.cli import main
from megatron.fill.errors import ConfigError, SandboxError
from megatron.fill.linux import host
from megatron.fill.linux.libc import PR_SET_CHILD_SUBREAPER, prctl
from megatron.fill.sandbox import probe, process
from megatron.fill.sandbox.probe import SandboxSupport
from megatron.fill.sandbox.remedy import remedy

ALL = ("pid", "mount")


@pytest.fixture
def machine(monkeypatch):
    """A machine that gives these namespaces to this user; what was asked of it."""
    asked: list[tuple[Any, ...]] = []

    def make(namespaces: tuple[str, ...] = ALL, user: int = 0) -> list[tuple[Any, ...]]:
        def look(*wanted: Any) -> SandboxSupport:
            asked.append(wanted)
            return SandboxSupport(namespaces, ())

        monkeypatch.setattr(sandbox, "look", look)
        monkeypatch.setattr(os, "geteuid", lambda: user)
        return asked

    return make


@pytest.fixture
def adopting():
    """``probe`` adopts orphans; a process of pytest that went on to do so would keep those of other tests."""
    yield
    prctl(PR_SET_CHILD_SUBREAPER, 0)


def test_jobs_of_root_are_nobody(machine):
    asked = machine()
    user, _ = find_support()
    assert user is not None
    assert asked == [(user.uid, user.gid, "", False)]


@pytest.mark.parametrize(
    ("euid", "how", "why"),
    [
        (1000, {}, "the training is not root's, so jobs run as its own user"),
        (0, {"mps": True}, "MPS serves one user only: jobs run as the training's"),
    ],
)
def test_where_jobs_are_the_training_s_user_that_wall_is_said_to_be_missing(machine, euid, how, why):
    asked = machine(user=euid)
    assert find_support(**how)[0] is None
    assert asked[0][2].startswith(why)


@pytest.mark.usefixtures("adopting")
def test_who_asks_for_the_training_s_own_user_is_not_told_of_that_wall(machine):
    asked = machine(user=65534)
    assert find_support("65534")[0] is None
    assert asked == [(None, None, None, False)]
    assert "user" not in [layer.name for layer in probe.probe(None, None, None, False).layers]


def test_an_interpreter_that_nobody_can_enter_is_said(machine, monkeypatch, tmp_path):
    closed = tmp_path / "closed" / "python"
    closed.parent.mkdir(mode=0o700)
    closed.touch()
    monkeypatch.setattr(sys, "executable", str(closed))
    asked = machine(("pid",))
    user, _ = find_support(places=[])
    assert user is None
    assert asked[-1][0] is None
    assert asked[-1][2].startswith("user nobody cannot enter /")
    with pytest.raises(ConfigError, match="nobody cannot enter"):
        find_support("nobody", places=[])
    machine()
    assert find_support(places=[])[0] is not None  # a view of its own shows what is needed


@pytest.mark.parametrize(
    ("uids", "gids", "groups", "may"),
    [
        ("0 0 4294967295", "0 0 4294967295", "allow", True),
        ("0 1000 1\n1 100000 65536", "0 1000 1\n1 100000 65536", "allow", True),
        ("0 1000 1", "0 1000 1", "allow", False),
        ("0 0 4294967295", "0 1000 1", "allow", False),
        ("0 0 4294967295", "0 0 4294967295", "deny", False),
        (None, None, None, True),
    ],
)
def test_root_of_a_rootless_container_may_have_no_other_user(tmp_path, uids, gids, groups, may):
    for name, text in (("uid_map", uids), ("gid_map", gids), ("setgroups", groups)):
        if text is not None:
            (tmp_path / name).write_text(text)
    assert host.may_become(65534, 65534, tmp_path) == may


@pytest.mark.parametrize(
    ("layer", "lacks", "files", "expected"),
    [
        (
            "files",
            "EPERM",
            {"sys/kernel/unprivileged_userns_clone": "0"},
            "sysctl -w kernel.unprivileged_userns_clone=1",
        ),
        ("files", "EPERM", {"sys/user/max_user_namespaces": "0"}, "sysctl -w user.max_user_namespaces=15000"),
        ("files", "EPERM", {"sys/kernel/apparmor_restrict_unprivileged_userns": "1"}, "restrict_unprivileged_userns=0"),
        ("files", "EPERM", {"self/status": "CapEff:\t0\nSeccomp:\t2"}, "paths=unconfined --security-opt seccomp="),
        ("files", "EPERM", {"self/status": "CapEff:\t0\nSeccomp:\t0"}, "the training as root"),
        ("files", "EACCES", {"self/status": "CapEff:\t200000"}, "--security-opt apparmor=unconfined"),
        ("processes", "EPERM", {"self/status": "CapEff:\t200000"}, "--security-opt systempaths=unconfined"),
        ("processes", "it needs a mount namespace", {}, ""),
        ("processes", "EPERM: '/proc'", {"self/status": "CapEff:\t0"}, "--security-opt systempaths=unconfined"),
        ("ipc", "EPERM", {"self/status": "CapEff:\t200000"}, ""),
        ("ipc", "EPERM", {"self/status": "CapEff:\t0"}, "what the layer files expects"),
        ("network", "EPERM", {"self/status": "CapEff:\t0"}, "what the layer files expects"),
        ("network", "EPERM", {"self/status": "CapEff:\t200000"}, "--cap-add NET_ADMIN"),
        ("network", "EPERM", {"self/status": "CapEff:\t201000"}, ""),
        ("system calls", "libseccomp.so.2 cannot be loaded", {}, "libseccomp2"),
        ("landlock", "landlock is not there", {}, "lsm="),
        ("landlock", "landlock has ABI 3", {}, ""),
    ],
)
def test_what_would_build_a_missing_layer(monkeypatch, tmp_path, layer, lacks, files, expected):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    said = remedy(layer, lacks, tmp_path)
    assert expected in said
    assert bool(said) == bool(expected)


def test_root_of_a_container_is_told_its_two_capabilities(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "status").write_text("CapEff:\t0\nSeccomp:\t2")
    said = remedy("files", "EPERM", tmp_path)
    assert "--cap-add NET_ADMIN --cap-add SYS_ADMIN" in said
    assert "seccomp" not in said  # the engine's own filter leaves room for those who have the capabilities


@pytest.mark.usefixtures("adopting")
def test_a_wall_is_not_said_to_stand_if_its_building_was_not_reached(monkeypatch):
    def stopped(*_: object) -> list[str]:
        raise OSError("not permitted")

    monkeypatch.setattr(process, "give_everything_up", stopped)
    found = {layer.name: layer.lacks for layer in probe.probe(None, None, "", False).layers}
    assert {found[name] for name in ("system calls", "landlock", "powers", "privileges")} == {"not permitted"}


def test_the_doctor_says_what_it_can(monkeypatch, capsys):
    def broken() -> None:
        raise SandboxError("nothing can be started")

    monkeypatch.setattr(sandbox, "find_support", broken)
    monkeypatch.setattr(sys, "argv", ["pipefill", "doctor"])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().out
    assert not ended.value.code
    assert "missing: nothing can be started" in said
    assert "LIMIT" in said

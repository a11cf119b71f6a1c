"""The system setting that would enable a missing sandbox layer, as far as this machine shows it."""

from __future__ import annotations

import os
from pathlib import Path

_SYSTEM_ADMINISTRATOR = 1 << 21  # the capability CAP_SYS_ADMIN
_SWITCHES = (  # switches of user namespaces: file in /proc/sys, value that forbids them, setting that allows them
    ("user/max_user_namespaces", "0", "user.max_user_namespaces=15000"),
    ("kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "kernel.apparmor_restrict_unprivileged_userns=0"),
)
_CONTAINER = "in a container --cap-add SYS_ADMIN --security-opt seccomp=unconfined --security-opt apparmor=unconfined"
_MOUNTS = "in a container --security-opt apparmor=unconfined"
_PROC = "in a container --security-opt systempaths=unconfined"
_KERNEL = "Linux 5.13 with landlock in its parameter lsm=, and in a container --security-opt seccomp=unconfined"


def remedy(layer: str, lacks: str, proc: Path = Path("/proc")) -> str:
    """The remedy for a missing layer; empty if none is known.

    Args:
        layer: name of the layer.
        lacks: reason why it is missing.
        proc: another /proc, for tests.
    """
    if layer in ("files", "processes"):  # the same remedy enables the other namespaces
        return _namespaces(layer, lacks, proc)
    if layer == "system calls" and "cannot be loaded" in lacks:
        return "the package libseccomp2 (libseccomp in some distributions)"
    if layer == "landlock" and "not there" in lacks:
        return _KERNEL
    return ""


def _namespaces(layer: str, lacks: str, proc: Path) -> str:
    if "mount namespace" in lacks:  # the remedy is given for the layer ``files``
        return ""
    status = _fields(proc / "self/status")
    powerful = int(status.get("CapEff", "0"), 16) & _SYSTEM_ADMINISTRATOR
    if powerful:
        return _PROC if layer == "processes" else _MOUNTS if layer == "files" else ""
    shut = [f"sysctl -w {setting}" for file, value, setting in _SWITCHES if _read(proc / "sys" / file) == value]
    if os.geteuid() != 0 and shut:
        return f"{' and '.join(shut)}, or the training as root"
    if status.get("Seccomp") == "2" or os.geteuid() == 0:
        return _CONTAINER
    return "the training as root"


def _fields(file: Path) -> dict[str, str]:
    lines = (line.partition(":") for line in _read(file).splitlines())
    return {name: value.strip() for name, _, value in lines}


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""

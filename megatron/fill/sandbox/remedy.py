"""The system setting that would enable a missing sandbox layer, as far as this machine shows it."""

from __future__ import annotations

import os
from pathlib import Path

from megatron.fill.linux.proc import text

_SYSTEM_ADMINISTRATOR, _NETWORK_ADMINISTRATOR = 1 << 21, 1 << 12  # CAP_SYS_ADMIN and CAP_NET_ADMIN
_SWITCHES = (  # switches of user namespaces: file in /proc/sys, value that forbids them, setting that allows them
    ("user/max_user_namespaces", "0", "user.max_user_namespaces=15000"),
    ("kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "kernel.apparmor_restrict_unprivileged_userns=0"),
)
_MOUNTS = "in a container --security-opt apparmor=unconfined"
_NETWORK = "in a container --cap-add NET_ADMIN"  # to bring up localhost in the job's own network
_CONTAINER = f"{_NETWORK} --cap-add SYS_ADMIN --security-opt apparmor=unconfined"
_PROC = "in a container --security-opt systempaths=unconfined"
_USERS_CONTAINER = f"{_PROC} --security-opt seccomp=unconfined --security-opt apparmor=unconfined"
_SAME = "what the layer files expects"
_KERNEL = "Linux 5.13 with landlock in its parameter lsm=, and in a container --security-opt seccomp=unconfined"


def remedy(layer: str, lacks: str, proc: Path = Path("/proc")) -> str:
    """The remedy for a layer that is missing for the reason ``lacks``; empty if none is known."""
    if layer in ("processes", "files", "ipc", "control groups", "network"):
        return _namespaces(layer, lacks, proc)
    if layer == "system calls" and "cannot be loaded" in lacks:
        return "the package libseccomp2 (libseccomp in some distributions)"
    if layer == "landlock" and "not there" in lacks:
        return _KERNEL
    return ""


def _namespaces(layer: str, lacks: str, proc: Path) -> str:
    if "mount namespace" in lacks:  # the remedy is given for the layer ``files``
        return ""
    if layer == "processes" and "/proc" in lacks:  # a namespace of its own, but none of its /proc
        return _PROC
    lines = (line.partition(":") for line in text(proc / "self/status").splitlines())
    status = {name: value.strip() for name, _, value in lines}
    powers = int(status.get("CapEff", "0"), 16)
    if powers & _SYSTEM_ADMINISTRATOR:
        shut_out = layer == "network" and not powers & _NETWORK_ADMINISTRATOR
        return _NETWORK if shut_out else {"processes": _PROC, "files": _MOUNTS}.get(layer, "")
    if layer != "files":  # the same remedy enables the other namespaces
        return _SAME
    shut = [f"sysctl -w {setting}" for file, value, setting in _SWITCHES if text(proc / "sys" / file).strip() == value]
    if os.geteuid() == 0:
        return _CONTAINER
    if shut:
        return f"{' and '.join(shut)}, or the training as root"
    return _USERS_CONTAINER if status.get("Seccomp") == "2" else "the training as root"

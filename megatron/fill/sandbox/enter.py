"""The setup of a sandbox, in three steps by three processes.

1. The *outer* process, which stays outside, creates the process namespace (and, if it is not root, a user namespace in
   which it has root's powers): its next child is the first process there.
2. That first process, the *init*, creates the other namespaces and the view of the files.  It runs no code of the job.
3. Its child gives up all powers permanently, and becomes the job.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from functools import partial
from pathlib import Path

from megatron.fill.sandbox import mounts, view
from megatron.fill.sandbox.config import Sandbox
from megatron.fill.sandbox.landlock import enter_rules
from megatron.fill.sandbox.naming import hand_over
from megatron.fill.sandbox.powers import bar_powers, become, forgo_privileges, give_up_powers, hide_memory
from megatron.fill.sandbox.seccomp import load_filter

# Namespaces in the order of their creation; each is a layer that ``probe`` names.
_FLAGS = {
    "user": os.CLONE_NEWUSER,
    "pid": os.CLONE_NEWPID,
    "mount": os.CLONE_NEWNS,
    "ipc": os.CLONE_NEWIPC,
    "cgroup": os.CLONE_NEWCGROUP,
    "net": os.CLONE_NEWNET,
}
NAMESPACES = tuple(_FLAGS)
_TCP_BYTES = "4096 131072 212992"  # minimum, initial size, maximum
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1
_ALWAYS_WRITABLE = ("/tmp", "/dev/shm")  # the view or file permissions limit writing there


def open_outer(sandbox: Sandbox) -> None:
    """Do step 1, in the outer process; OSError if a namespace cannot be created."""
    if "user" in sandbox.namespaces:
        user, group = os.geteuid(), os.getegid()
        os.unshare(os.CLONE_NEWUSER)
        # The user is mapped to itself: files keep their owners, and no other user exists inside.
        Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="ascii")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="ascii")
    if "pid" in sandbox.namespaces:
        os.unshare(os.CLONE_NEWPID)


def open_inner(sandbox: Sandbox) -> int:
    """Do step 2, in the init; OSError if a namespace or the view cannot be created.

    Returns:
        Descriptor of a writable ``/proc`` for ``openat``; the job sees its own read-only.
    """
    os.umask(0o022)
    outer = ("user", "pid", "net") if sandbox.network else ("user", "pid")
    inner = [name for name in sandbox.namespaces if name not in outer]
    if inner:
        os.unshare(sum(_FLAGS[name] for name in inner))
    if "net" in inner:
        _raise_loopback()
        if "uncounted memory" not in sandbox.without:
            _fix_buffers()
    if "mount" not in inner:
        return os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    proc = mounts.take("/proc")  # while it is writable: after this, everything is read-only
    view.build(sandbox)
    if "pid" in sandbox.namespaces:
        os.close(proc)
        proc = view.see_own_processes()
    if "proc" in sandbox.without:
        mounts.put(os.dup(proc), "/proc")
    return proc


def give_everything_up(sandbox: Sandbox, names: socket.socket | None = None) -> list[str]:
    """Do step 3, in the process that becomes the job, which must have no other thread yet.

    Args:
        names: socket to the init, which lets the job name its threads (``naming``); None without devices.

    Returns:
        For each layer the reason why it is missing, or ''.

    Raises:
        OSError: it cannot become the job's user.
    """
    lacking = [forgo_privileges()]
    bar_powers()
    if sandbox.user is not None and sandbox.group is not None:
        become(sandbox.user, sandbox.group)
    network = sandbox.network or "net" in sandbox.namespaces
    if "landlock" not in sandbox.without:
        lacking.append(enter_rules(_writable(sandbox), network))
    lacking.append(give_up_powers())
    hide_memory(False)  # the change of user has made the process unreadable, also to the job
    if "system calls" not in sandbox.without:
        asked = None if names is None else partial(hand_over, names)
        counted = "uncounted memory" not in sandbox.without
        lacking.append(load_filter(counted, bool(sandbox.devices), asked))
    if len(os.listdir("/proc/self/task")) > 1:
        lacking.append("a thread that runs already keeps its powers")  # the kernel confines threads one by one
    return lacking


def _writable(sandbox: Sandbox) -> list[str]:
    """The paths that Landlock leaves writable: none in ``/proc``, and in ``/dev`` the devices that the view shows."""
    kernel = ("/proc",) if "proc" in sandbox.without else ()
    return [*sandbox.writable, *_ALWAYS_WRITABLE, *view.nodes(sandbox), *kernel]


def _fix_buffers() -> None:
    """Limit TCP's buffers, in the job's own network, to the size of other sockets' buffers."""
    for name in ("tcp_rmem", "tcp_wmem"):
        with contextlib.suppress(OSError):  # read-only in a container
            Path(f"/proc/sys/net/ipv4/{name}").write_text(_TCP_BYTES, encoding="ascii")


def _raise_loopback() -> None:
    """Bring up ``localhost`` in the job's own network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = bytearray(struct.pack("16sh22x", b"lo", 0))
        fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request)
        flags = struct.unpack_from("h", request, 16)[0] | _IFF_UP
        struct.pack_into("h", request, 16, flags)
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, request)

"""Permission for a job on a GPU to name its threads, though its ``/proc`` is read-only.

CUDA's driver, from 570 on, opens ``/proc/self/task/N/comm`` for writing when it starts; cuInit fails with 304 if that
is refused.  No other layer can permit this file alone: mounts and Landlock need files that exist before, seccomp cannot
see paths.  So if a job has devices, the kernel asks the job's init about each file that is opened for writing
(seccomp_unotify(2)).  For that path, the init opens the file itself, of the very process that asks, and passes the
descriptor to it.  For any other path, it lets the system call continue, so that the other layers decide.

Based on what it reads of the job's memory, the init grants nothing but such a descriptor, so it does no harm that the
job can change its memory in the meantime.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import socket
import struct
import threading
from collections.abc import Mapping

from megatron.fill.sandbox.config import Sandbox
from megatron.fill.sandbox.seccomp import opening_calls

_NOTICE = struct.Struct("=QIIiIQ6Q")  # id, thread, flags; call, architecture, instruction, arguments
_ANSWER = struct.Struct("=QqiI")  # id, result, error, flags
_DESCRIPTOR = struct.Struct("=QIIII")  # id, flags, ours, theirs, flags of theirs
_RECEIVE, _SEND, _ADD = 0xC0502100, 0xC0182101, 0x40182103
_GO_ON, _ANSWER_TOO = 1, 2
_NAME_OF_THREAD = re.compile(rb"/proc/(?:self|\d+)/task/(\d+)/comm\0")
_MOST_BYTES = 64  # longer than any such path
_UNANSWERED = (errno.ENOENT, errno.EINTR)  # the asking thread has died, or was interrupted and will ask again


def hand_over(channel: socket.socket, notices: int) -> None:
    """Send the init, at the other end of ``channel``, the descriptor on which the kernel asks, and close it here."""
    socket.send_fds(channel, [b"x"], [notices])
    os.close(notices)


def answer(channel: socket.socket, proc: int, sandbox: Sandbox) -> None:
    """Start a thread of this process, the init, that answers the kernel; do nothing if the job's side is closed.

    Args:
        channel: socket to the job's side.
        proc: descriptor of a writable ``/proc`` of the job.

    Raises:
        OSError: the init cannot take the rights of the job's user, which it needs to read the job's memory.
    """
    _, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
    if not descriptors:
        return
    if sandbox.user is not None and sandbox.group is not None:
        # Without power over other users' processes, it can read only those of its own user.
        os.setgroups([])
        os.setegid(sandbox.group)
        os.seteuid(sandbox.user)
    threading.Thread(target=_serve, args=(descriptors[0], proc, opening_calls()), daemon=True).start()


def _serve(notices: int, proc: int, calls: Mapping[int, int]) -> None:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # it works for the job
    try:
        while True:
            notice = bytearray(_NOTICE.size)
            try:
                fcntl.ioctl(notices, _RECEIVE, notice)
            except OSError as error:
                if error.errno in _UNANSWERED:
                    continue
                return
            asked, thread, _, call, _, _, *arguments = _NOTICE.unpack(notice)
            path = calls[call]
            if not _give(notices, proc, asked, thread, arguments[path], arguments[path + 1]):
                with contextlib.suppress(OSError):  # the asking thread has died
                    fcntl.ioctl(notices, _SEND, _ANSWER.pack(asked, 0, 0, _GO_ON))
    finally:
        os.close(notices)  # further calls are refused at once and do not wait


def _give(notices: int, proc: int, asked: int, thread: int, address: int, flags: int) -> bool:
    """Give the asking thread the file if it holds the name of a thread of its own process; return True if it does."""
    mode = flags & os.O_ACCMODE | os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.ExitStack() as opened, contextlib.suppress(OSError, OverflowError):
        memory = os.open(f"{thread}/mem", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
        opened.callback(os.close, memory)
        if named := _NAME_OF_THREAD.match(os.pread(memory, _MOST_BYTES, address)):
            # The file does not exist if the thread is not one of that process.
            ours = os.open(f"{thread}/task/{int(named[1])}/comm", mode, dir_fd=proc)
            opened.callback(os.close, ours)
            fcntl.ioctl(notices, _ADD, _DESCRIPTOR.pack(asked, _ANSWER_TOO, ours, 0, flags & os.O_CLOEXEC))
            return True
    return False

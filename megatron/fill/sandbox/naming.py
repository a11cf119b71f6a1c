"""Lets a job on a GPU name its threads, though it sees ``/proc`` read-only.

CUDA's driver, from 570 on, opens ``/proc/self/task/N/comm`` to write when it starts; cuInit fails with 304 if that is
refused.  No wall tells that file from its neighbours: mounts and Landlock know files that are there before, seccomp
sees no path.  So where a job has devices, the kernel asks the job's init about each file that is opened to write
(seccomp_unotify(2)).  The answer is that the job may go on, to where its other walls let it, but for that one path: the
init opens such a file itself, of the very process that asks, and gives it the descriptor.

The init grants nothing by what it reads of the job's memory but a descriptor of that kind, so it does no harm that the
job can change its memory meanwhile.
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
from collections.abc import Callable, Mapping

from megatron.fill.sandbox.cage import Cage

_NOTICE = struct.Struct("=QIIiIQ6Q")  # id, thread, flags; call, architecture, instruction, arguments
_ANSWER = struct.Struct("=QqiI")  # id, result, error, flags
_DESCRIPTOR = struct.Struct("=QIIII")  # id, flags, ours, theirs, flags of theirs
_RECEIVE, _SEND, _ADD = 0xC0502100, 0xC0182101, 0x40182103
_GO_ON, _ANSWER_TOO = 1, 2
_NAME_OF_THREAD = re.compile(rb"/proc/(?:self|\d+)/task/(\d+)/comm\0")
_MOST_BYTES = 64  # longer than any such path
_UNANSWERED = (errno.ENOENT, errno.EINTR)  # whoever asked has died or was interrupted, and will ask anew


def hand_over(channel: socket.socket, notices: int) -> None:
    """Give the init, at the other end, the descriptor on which the kernel asks; it is closed here."""
    socket.send_fds(channel, [b"x"], [notices])
    os.close(notices)


def answer(channel: socket.socket, proc: int, cage: Cage, calls: Callable[[], Mapping[int, int]]) -> None:
    """Answer in a thread of this process, the init, from now on; at once nothing, if the job's side is closed.

    Args:
        proc: a descriptor of the job's ``/proc`` that can be written.
        calls: says, by its number, each system call that opens a file: which of its arguments is the path.

    Raises:
        OSError: it cannot have the rights of the job's user, as whom it looks at the job.
    """
    _, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
    if not descriptors:
        return
    if cage.user is not None and cage.group is not None:
        # Whoever has no power over other users' processes may look into those of its own.
        os.setgroups([])
        os.setegid(cage.group)
        os.seteuid(cage.user)
    threading.Thread(target=_serve, args=(descriptors[0], proc, calls()), daemon=True).start()


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
                with contextlib.suppress(OSError):  # whoever asked has died
                    fcntl.ioctl(notices, _SEND, _ANSWER.pack(asked, 0, 0, _GO_ON))
    finally:
        os.close(notices)  # whoever asks from now on is refused, and waits for nobody


def _give(notices: int, proc: int, asked: int, thread: int, address: int, flags: int) -> bool:
    """Give the asking thread the file, if it is the name of a thread of its own process; whether it was."""
    mode = flags & os.O_ACCMODE | os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.ExitStack() as opened, contextlib.suppress(OSError, OverflowError):
        memory = os.open(f"{thread}/mem", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
        opened.callback(os.close, memory)
        if named := _NAME_OF_THREAD.match(os.pread(memory, _MOST_BYTES, address)):
            # There is no such file if it is no thread of that process.
            ours = os.open(f"{thread}/task/{int(named[1])}/comm", mode, dir_fd=proc)
            opened.callback(os.close, ours)
            fcntl.ioctl(notices, _ADD, _DESCRIPTOR.pack(asked, _ANSWER_TOO, ours, 0, flags & os.O_CLOEXEC))
            return True
    return False

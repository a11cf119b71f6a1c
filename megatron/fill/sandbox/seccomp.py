"""The system calls that no job needs and that reach beyond it, refused by the kernel (seccomp(2)).

The list follows that of container runtimes, and adds calls that would harm a neighbour on the same cores: scheduling,
and new sessions and process groups.  A job stays in one process group, so one signal stops all of it; and in the
training's session, outside of which its idle class would have no effect (autogroups).

libseccomp, which knows the numbers of every architecture, builds the filter.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from functools import partial
from typing import Any

_LIBRARY = "libseccomp.so.2"
_ALLOW, _ASK, _ERRNO = 0x7FFF0000, 0x7FC00000, 0x00050000
_OPTIMIZE = 8  # an attribute; 2 is a binary tree
_NOT_EQUAL, _EQUAL, _GREATER, _MASKED_EQUAL = 1, 4, 6, 7

# Inspecting other processes and their memory.
_TRACING = ("ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "pidfd_getfd", "kcmp")
# Scheduling, process groups and sessions.
_SCHEDULING = (
    *("sched_setscheduler", "sched_setparam", "sched_setattr", "sched_setaffinity", "setpriority", "ioprio_set"),
    *("setsid", "setpgid", "vhangup", "move_pages", "migrate_pages"),
)
_FILES = (
    *("mount", "umount", "umount2", "pivot_root", "chroot", "move_mount", "open_tree", "open_tree_attr", "fsopen"),
    *("fsconfig", "fsmount", "fspick", "mount_setattr", "swapon", "swapoff", "quotactl", "quotactl_fd"),
    *("fanotify_init", "open_by_handle_at", "name_to_handle_at", "unshare", "setns"),
)
# Large kernel interfaces that few programs need.
_DOORS = (
    *("bpf", "perf_event_open", "userfaultfd", "io_uring_setup", "io_uring_enter", "io_uring_register"),
    *("add_key", "request_key", "keyctl", "iopl", "ioperm", "modify_ldt", "personality", "lookup_dcookie"),
    *("nfsservctl", "acct", "syslog"),
)
_MACHINE = (
    *("init_module", "finit_module", "delete_module", "create_module", "kexec_load", "kexec_file_load", "reboot"),
    *("settimeofday", "clock_settime", "clock_adjtime", "adjtimex", "stime", "sethostname", "setdomainname"),
)
# Moving waiters from one word to another, which the kernel allows even on words that the caller cannot write.  C
# libraries do it only within a process (the operation's flag 128), and need none of the later calls for it.
_REQUEUE, _OPERATION = (3, 4, 12), 0xFF
_FUTEX2 = (449, 454, 455, 456)  # futex_waitv, futex_wake, futex_wait, futex_requeue: on every architecture
# Memory and other kernel objects that are not counted for any process.
_SYSTEM_V = (
    *("shmget", "shmat", "shmctl", "semget", "semop", "semtimedop", "semctl", "msgget", "msgsnd", "msgrcv", "msgctl"),
    *("mq_open", "mq_unlink"),
)
_MEMFD_SECRET = 447  # on every architecture
# Pages held only by a pipe; requests, whose number is limited for the whole machine; watched files.
_UNCOUNTED = (_MEMFD_SECRET, "vmsplice", "io_setup", "inotify_init", "inotify_init1")
_SET_PIPE_SIZE, _OF_SOCKET, _SET_DUMPABLE = 1031, 1, 4
_BUFFER_SIZES = (7, 8, 32, 33)  # SO_SNDBUF and SO_RCVBUF, as anyone and as root
_MAP_HUGE, _MAP_KIND, _MAP_SHARED_ANONYMOUS = 0x40000, 0x2F, 0x21  # the kind: shared or private, and of no file
_OPENING = {b"open": 0, b"openat": 1}  # the flags come after the path
_SCHED_CORE = 62
_SET_SELF_ATTR = 459  # lsm_set_self_attr, which does what the files in /proc/self/attr do
_NAMESPACES = (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)  # CLONE_NEW*
# Requests of a terminal: typing into it, stopping its flow, its modes, its owner.
_TERMINAL = (0x5402, 0x5403, 0x5404, 0x5406, 0x5407, 0x5408, 0x540A, 0x540E, 0x5410, 0x5412, 0x541C, 0x5423)
# Refused socket families: all but unix (1), IPv4 (2), IPv6 (10) and netlink (16).
_SOCKETS = (*range(3, 10), *range(11, 16))
_LAST_SOCKET = 16


class _Condition(ctypes.Structure):
    _fields_ = (("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


def load_filter(counted: bool, shared: bool, asked: Callable[[int], None] | None) -> str:
    """Refuse those calls for this thread and all that it starts, permanently, with no_new_privs set before.

    Args:
        counted: True to refuse memory that no watch can count.
        shared: True to allow shared memory without a file all the same, which CUDA's driver may use.
        asked: called with a descriptor on which the kernel asks about each file opened for writing (``naming``); None
            to not ask.

    Returns:
        An error message, or ''.
    """
    try:
        library = _open()
    except OSError as error:
        return f"no system call is refused: {_LIBRARY} cannot be loaded: {error}"
    context = library.seccomp_init(_ALLOW)
    if not context:
        return f"no system call is refused: {_LIBRARY} does not start"
    asks = asked is not None and _can_ask(library)
    try:
        library.seccomp_attr_set(context, _OPTIMIZE, 2)  # a version without it is only slower
        _add_rules(library, context)
        if counted:
            _add_uncounted(library, context, shared)
        if asks:
            _add_questions(library, context)
        if code := library.seccomp_load(context):
            return f"no system call is refused: {errno.errorcode.get(-code, code)}"
        notices = library.seccomp_notify_fd(context) if asks else -1
    finally:
        library.seccomp_release(context)
    if asked is None:
        return ""
    if notices < 0:
        return f"CUDA may not start (304), as a job cannot name its threads: expected {_LIBRARY} 2.5, Linux 5.14"
    asked(notices)
    return ""


def opening_calls() -> dict[int, int]:
    """The system calls that open a file with flags that a filter can see: by number, the index of the path argument.

    Raises:
        OSError: libseccomp, which knows the numbers, is missing.
    """
    library = _open()
    numbers = {library.seccomp_syscall_resolve_name(name): path for name, path in _OPENING.items()}
    return {number: path for number, path in numbers.items() if number >= 0}


def _can_ask(library: Any) -> bool:
    return hasattr(library, "seccomp_notify_fd")  # from 2.5 on


def _add_questions(library: Any, context: int) -> None:
    for number, path in opening_calls().items():
        for flag in (os.O_WRONLY, os.O_RDWR):
            condition = (_Condition * 1)(_Condition(path + 1, _MASKED_EQUAL, flag, flag))
            library.seccomp_rule_add_array(context, _ASK, number, 1, condition)


def _open() -> Any:
    library = ctypes.CDLL(_LIBRARY)
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_attr_set.argtypes = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32
    words = (ctypes.c_uint32, ctypes.c_int, ctypes.c_uint)
    library.seccomp_rule_add_array.argtypes = (ctypes.c_void_p, *words, ctypes.c_void_p)
    library.seccomp_load.argtypes = library.seccomp_release.argtypes = (ctypes.c_void_p,)
    if _can_ask(library):
        library.seccomp_notify_fd.argtypes = (ctypes.c_void_p,)
    return library


def _refuse(library: Any, context: int, call: str | int, *conditions: tuple[int, ...], code: int = errno.EPERM) -> None:
    number = call if isinstance(call, int) else library.seccomp_syscall_resolve_name(call.encode())
    if number < 0:  # this architecture, or this libseccomp, does not have it
        return
    array = (_Condition * len(conditions))(*(_Condition(*one) for one in conditions))
    library.seccomp_rule_add_array(context, _ERRNO | code, number, len(conditions), array)


def _add_uncounted(library: Any, context: int, shared: bool) -> None:
    """Refuse memory that exists without being mapped by a process or being a file in a file system."""
    refuse = partial(_refuse, library, context)
    for call in (*_SYSTEM_V, *_UNCOUNTED, *(() if shared else ("memfd_create",))):
        refuse(call, code=errno.ENOSYS)  # so that libraries fall back
    refuse("mmap", (3, _MASKED_EQUAL, _MAP_HUGE, _MAP_HUGE), code=errno.ENOMEM)  # as if no huge pages were reserved
    refuse("fcntl", (1, _EQUAL, _SET_PIPE_SIZE, 0))
    for option in _BUFFER_SIZES:  # reported as success (0): the kernel, too, silently gives less than asked for
        refuse("setsockopt", (1, _EQUAL, _OF_SOCKET, 0), (2, _EQUAL, option, 0), code=0)
    refuse("prctl", (0, _EQUAL, _SET_DUMPABLE, 0), (1, _EQUAL, 0, 0))  # its open files must stay countable
    if not shared:
        refuse("mmap", (3, _MASKED_EQUAL, _MAP_KIND, _MAP_SHARED_ANONYMOUS))


def _add_rules(library: Any, context: int) -> None:
    refuse = partial(_refuse, library, context)
    for name in (*_TRACING, *_SCHEDULING, *_FILES, *_DOORS, *_MACHINE):
        refuse(name)
    refuse("prlimit64", (0, _NOT_EQUAL, 0, 0))  # limits of another process
    refuse("prctl", (0, _EQUAL, _SCHED_CORE, 0))  # core scheduling
    refuse(_SET_SELF_ATTR)
    refuse("clone3", code=errno.ENOSYS)  # its flags cannot be seen from here; every C library falls back to clone
    for operation in _REQUEUE:
        refuse("futex", (1, _MASKED_EQUAL, _OPERATION, operation), code=errno.ENOSYS)
    for number in _FUTEX2:
        refuse(number, code=errno.ENOSYS)
    for flag in _NAMESPACES:
        refuse("clone", (0, _MASKED_EQUAL, flag, flag))
    for request in _TERMINAL:
        refuse("ioctl", (1, _MASKED_EQUAL, 0xFFFFFFFF, request))
    for call in ("socket", "socketpair"):
        for family in _SOCKETS:
            refuse(call, (0, _EQUAL, family, 0), code=errno.EAFNOSUPPORT)
        refuse(call, (0, _GREATER, _LAST_SOCKET, 0), code=errno.EAFNOSUPPORT)

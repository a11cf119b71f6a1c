"""System calls that Python has no function for."""

from __future__ import annotations

import ctypes
import platform

from megatron.fill.linux.libc import system_call

# (x86_64, aarch64): the two kinds of machines that GPUs are found in.
_NUMBERS = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "clock_adjtime": (305, 266),
    "clone3": (435, 435),
    "delete_module": (176, 106),
    "exit": (60, 93),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsopen": (430, 430),
    "futex": (202, 98),
    "futex_requeue": (456, 456),
    "futex_waitv": (449, 449),
    "get_robust_list": (274, 100),
    "inotify_add_watch": (254, 27),
    "inotify_init1": (294, 26),
    "io_uring_setup": (425, 425),
    "ioprio_set": (251, 30),
    "kcmp": (312, 272),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "memfd_secret": (447, 447),
    "migrate_pages": (256, 238),
    "modify_ldt": (154, -1),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "rt_sigqueueinfo": (129, 138),
    "sched_setattr": (314, 274),
    "semget": (64, 190),
    "set_robust_list": (273, 99),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "shmget": (29, 194),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "tgkill": (234, 131),
    "timer_create": (222, 107),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "vhangup": (153, 58),
}
_COLUMN = {"x86_64": 0, "aarch64": 1}.get(platform.machine())


def syscall(name: str, *arguments: int | bytes | ctypes.Array[ctypes.c_char] | None) -> int:
    """Make the system call of this name, and return its result.

    Raises:
        OSError: the kernel refused it; ENOSYS on a machine whose call numbers are unknown.
    """
    if _COLUMN is None:
        raise OSError(38, f"the number of {name} is not known on {platform.machine()}")
    try:
        return system_call(_NUMBERS[name][_COLUMN], *arguments)
    except OSError as error:
        raise OSError(error.errno, f"{name}: {error.strerror}") from None

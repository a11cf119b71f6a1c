"""System calls that Python has no name for."""

from __future__ import annotations

import ctypes
import platform

from megatron.fill.linux.libc import system_call

# (x86_64, aarch64): the two kinds of machines that GPUs are found in.
_NUMBERS = {
    "add_key": (248, 217),
    "bpf": (321, 280),
    "clock_adjtime": (305, 266),
    "exit": (60, 93),
    "finit_module": (313, 273),
    "io_uring_setup": (425, 425),
    "ioprio_set": (251, 30),
    "kcmp": (312, 272),
    "keyctl": (250, 219),
    "kexec_load": (246, 104),
    "modify_ldt": (154, -1),
    "mount": (165, 40),
    "move_pages": (279, 239),
    "open_by_handle_at": (304, 265),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_madvise": (440, 440),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "reboot": (169, 142),
    "rt_sigqueueinfo": (129, 138),
    "sched_setattr": (314, 274),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "swapoff": (168, 225),
    "tgkill": (234, 131),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}
_COLUMN = {"x86_64": 0, "aarch64": 1}.get(platform.machine())


def syscall(name: str, *arguments: int | bytes | ctypes.Array[ctypes.c_char] | None) -> int:
    """Make a call of this name.

    Raises:
        OSError: the kernel refuses; ENOSYS on a machine whose numbers are not known here.
    """
    if _COLUMN is None:
        raise OSError(38, f"the number of {name} is not known on {platform.machine()}")
    try:
        return system_call(_NUMBERS[name][_COLUMN], *arguments)
    except OSError as error:
        raise OSError(error.errno, f"{name}: {error.strerror}") from None

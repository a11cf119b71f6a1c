"""The controls of all attacks by name: the layers that would stop each, and the evidence once they are left out.

Where several layers are listed, each of them would stop it alone.
"""

from __future__ import annotations

from tests.chaos.attacks import table
from tests.chaos.controls import brought, more, proofs
from tests.chaos.controls.control import Control
from tests.chaos.controls.control import like as _like
from tests.chaos.controls.walls import Wall
from tests.chaos.kind import MIB

_DIED, _STAYS, _FAILS = ("died",), ("stays",), ("error",)
_HIDDEN = (Wall.PROCESSES, Wall.USER)
_SIGNALS = (*_HIDDEN, Wall.RULES)
_LOOK_IN = (*_HIDDEN, Wall.CALLS, Wall.POWERS, Wall.RULES)
_SCHEDULING = (*_HIDDEN, Wall.CALLS, Wall.POWERS)
_RISING = (Wall.CALLS, Wall.POWERS, Wall.USER)
_OUTSIDE = (Wall.FILES, Wall.USER)
_CGROUPS = (Wall.FILES, Wall.USER, Wall.RULES, Wall.POWERS)


_PROCESSES = {
    **_like((*_HIDDEN, Wall.CALLS), "prlimit-rank"),
    **_like(_LOOK_IN, "ptrace-rank", "vm-write-rank", "pidfd-getfd", "move-memory-rank"),
    **_like(_OUTSIDE, "proc-files-rank"),
    **_like(_SIGNALS, "signal-rank", proof=proofs.rank_is_dead),
    **_like(_SIGNALS, "kill-everybody", ends=_DIED, proof=proofs.rank_is_dead),
    **_like(_SIGNALS, "signal-agents", proof=proofs.agents_are_dead),
    **_like(_SIGNALS, "stop-agents", proof=proofs.agents_are_stopped),
    **_like(_SIGNALS, "stop-threads", proof=proofs.rank_is_stopped),
    **_like((Wall.RULES, Wall.USER), "kill-init"),
    **_like(Wall.CARE, "stop-group", ends=_STAYS, proof=proofs.job_is_stopped, within_s=1.0),
    **_like(Wall.TIME, "exit-main-thread", ends=_STAYS, proof=proofs.job_is_gone, within_s=1.0),
    **_like(Wall.CARE, "exec-away", ends=_STAYS, proof=proofs.job_is_another, within_s=1.0),
    **_like(Wall.PROCESSES, "forget-parent", "double-fork", proof=proofs.outlives),
    **_like(Wall.DESCRIPTORS, "pass-descriptors"),
}
_CORES = {
    **_like(_RISING, "fifo-step", "fifo-thread", "leave-idle"),
    **_like(_SCHEDULING, "nice-rank", "idle-rank", "affinity-rank", "ionice-rank"),
    **_like((*_OUTSIDE, Wall.RULES), "oom-rank", "autogroup-rank"),
    **_like((*_OUTSIDE, Wall.RULES, Wall.POWERS), "slack-rank"),
    **_like(Wall.STOP, "setsid-busy", "burn-thread", "copy-thread", proof=proofs.busy),
    **_like(Wall.PACE, "copy-step", "thrash-step"),
    **_like(Wall.TIME, "sleeper", "beating-hang", ends=_STAYS, within_s=1.0),
    **_like(Wall.CARE, "futex-storm", prepared=proofs.listening("control"), proof=proofs.woken),
    **_like(Wall.PACE, "timer-storm", "signal-storm"),
}
_KERNEL = {
    **_like(Wall.CALLS, "powers", "unshare", "userfaultfd", "keyring", "io-uring", "odd-calls"),
    **_like((*_CGROUPS, Wall.PROCESSES), "cgroup-kill-rank", proof=proofs.rank_is_dead),
    **_like((*_CGROUPS, Wall.PROCESSES), "cgroup-freeze-rank"),
    **_like(_CGROUPS, "cgroup-freeze-self", ends=_STAYS, within_s=1.0),
    **_like((*_CGROUPS, Wall.CALLS), "setns-rank"),
    **_like((*_RISING, Wall.RULES), "mount"),
    **_like(_RISING, "chroot", "bpf", "machine", "file-handle", "perf-event"),
    **_like((Wall.FILES, Wall.RULES, Wall.USER), "proc-sys"),
    **_like(_OUTSIDE, "devices"),
    **_like((Wall.POWERS, Wall.USER), "mknod"),
    **_like(Wall.LIMITS, "lift-limits"),
    **_like(Wall.LIMITS, "core-dump", ends=_DIED, proof=proofs.core_file),
}
_READ = {
    name: Control((Wall.READER,), proof=proofs.careless(read))
    for name, read in (
        ("plan-fifo", proofs.plain_bytes("plan.json")),
        ("plan-zero", proofs.plain_bytes("plan.json")),
        ("plan-deep", proofs.plain_json("plan.json")),
        ("profile-shape", proofs.plain_json("profile.json")),
        ("profile-deep", proofs.plain_json("profile.json")),
        ("result-deep", proofs.plain_json("result.json")),
        ("result-odd", proofs.plain_json("result.json")),
        ("files-fifo", proofs.plain_bytes("checkpoint.pt")),
        ("files-zero", proofs.plain_bytes("checkpoint.pt")),
        ("files-loop", proofs.plain_bytes("checkpoint.pt")),
        ("files-folder", proofs.plain_bytes("checkpoint.pt")),
    )
}
_CHECKPOINTS = {
    name: Control((Wall.READER,), ends=_DIED, proof=proofs.careless(read))
    for name, read in (
        ("checkpoint-bomb", proofs.unpickled),
        ("checkpoint-sparse", proofs.plain_bytes("checkpoint.pt")),
        ("checkpoint-fifo", proofs.plain_bytes("checkpoint.pt")),
        ("checkpoint-zero", proofs.plain_bytes("checkpoint.pt")),
    )
}
_FILES = {
    **_READ,
    **_CHECKPOINTS,
    **_like((*_OUTSIDE, Wall.RULES), "folder-link", "write-outside", "delete-run"),
    **_like((*_OUTSIDE, Wall.RULES), "announcement-empty", "announcement-fifo", "store-write"),
    **_like(Wall.FILES, "store-lock-inside", "store-read"),
    **_like(Wall.READER, "folder-closed", proof=proofs.closed),
    **_like(Wall.PROCESSES, "folder-lock", ends=_STAYS, proof=proofs.folder_is_locked, within_s=1.0),
}
_PAGES = {
    **_like((*_OUTSIDE, Wall.PROCESSES, Wall.POWERS, Wall.RULES), "foreign-pages"),
    **_like(Wall.PAGES, "control-write", "pages-resize"),
    **_like(Wall.READER, "pages-punch", prepared=proofs.filled("baton"), proof=proofs.page_is_empty("baton")),
    **_like(Wall.READER, "baton-zeros", prepared=proofs.filled("baton"), proof=proofs.page_is_empty("baton")),
    **_like(Wall.READER, "baton-ones", "baton-flicker", proof=proofs.page_changes("baton")),
    **_like(Wall.READER, "log-ones", "log-nan", "log-flicker", proof=proofs.page_changes("steps")),
}
_WORDS = {
    **_like(
        Wall.READER,
        *(f"word-{name}" for name in ("brackets", "integer", "digits", "nested", "types", "nan", "escapes", "long")),
        "word-cancelled",
        ends=_DIED,
        proof=proofs.careless(proofs.last_word),
    ),
    **_like(Wall.TIME, "word-linger", ends=_STAYS, proof=proofs.careless(proofs.last_word), within_s=1.0),
    **_like(Wall.READER, *(f"work-{name}" for name in ("inf", "nan", "most", "negative")), proof=proofs.odd_work),
}
_RESOURCES = {
    **_like((Wall.MEMORY, Wall.CALLS), "memory-files", proof=proofs.memory_files),
    **_like((Wall.MEMORY, Wall.FILES), "shm-full", proof=proofs.shared_memory),
    **_like((Wall.MEMORY, Wall.FILES), "shm-inodes", proof=proofs.shared_names),
    **_like(Wall.QUOTA, "disk-fill-inside", proof=proofs.disk_is_full),
    **_like(Wall.TASKS, "pid-space"),
    **_like(Wall.TASKS, "zombies", proof=proofs.zombies, within_s=20.0),
    **_like(Wall.TASKS, "thread-bomb", ends=_FAILS, proof=proofs.threads),
    **_like((Wall.LIMITS, Wall.USER, Wall.POWERS), "lock-memory", proof=proofs.locked_memory),
    **_like(Wall.OUTPUT, "huge-line", proof=proofs.output(3 * MIB)),
    **_like(Wall.CARE, "no-output", proof=proofs.no_output),
    **_like(Wall.READER, "escapes", proof=proofs.output(1000, b"\x1b[2J")),
    **_like(Wall.MEMORY, "pipes"),
    **_like(Wall.READER, "file-names", proof=proofs.odd_names),
}
_NETWORK = {
    **_like((Wall.POWERS, Wall.USER, Wall.NETWORK), "loopback-down"),
    **_like((Wall.NETWORK, Wall.RULES), "rank-ports", "unix-sockets"),
    **_like(Wall.CALLS, "raw-sockets"),
    **_like(Wall.NETWORK, "netlink"),
    **_like((Wall.CALLS, Wall.FILES, Wall.RULES), "terminal-stop", "terminal-type", "terminal-hang-up"),
}
CONTROLS: dict[str, Control] = {
    **more.CONTROLS,
    **brought.CONTROLS,
    **_PROCESSES,
    **_CORES,
    **_KERNEL,
    **_FILES,
    **_PAGES,
    **_WORDS,
    **_RESOURCES,
    **_NETWORK,
}
# Attacks of jobs, and of what jobs bring along.
ATTACKS = {**table.ATTACKS, **brought.ATTACKS}

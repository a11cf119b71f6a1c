"""Controls of attacks on ``/proc``, locks, futexes, memory, folders and the sandbox itself; see ``table``."""

from __future__ import annotations

from tests.chaos.controls import proofs
from tests.chaos.controls.control import Control, like
from tests.chaos.controls.walls import Wall

_PROC = (Wall.PROC,)
_OUTSIDE = (Wall.FILES, Wall.USER, Wall.RULES)
_HIDDEN = (Wall.PROCESSES, Wall.USER)
_RISING = (Wall.CALLS, Wall.POWERS, Wall.USER)
_PROCFS = {
    **like(_PROC, "own-oom-score-adj", "own-oom-adj", "own-autogroup", "own-timerslack-ns", "own-coredump-filter"),
    **like(_PROC, "own-clear-refs", "own-sched", "own-comm", "own-threads", "own-child", "own-past-mount"),
    **like(_PROC, "own-memory"),
    **like((Wall.CALLS, Wall.PROC), "own-id-maps"),
    **like((*_PROC, Wall.USER, Wall.POWERS), "own-odd"),
    **like(Wall.DESCRIPTORS, "own-kept-open"),
    **like((*_OUTSIDE, Wall.PROCESSES), "standing-rank", "standing-agent"),
    **like((*_PROC, Wall.USER), "standing-init"),
}
_TRICKS = {
    **like((*_HIDDEN, Wall.RULES), "owner-signals"),
    **like(Wall.PROCESSES, "process-descriptors", "ask-about"),
    **like(_RISING, "doors", "io-class", "new-mounts"),
    **like(Wall.CALLS, "clone-namespaces", "name-to-handle", "own-session"),
    **like(_RISING, "child-class"),
    **like((*_OUTSIDE, Wall.POWERS), "cgroup-join"),
    **like((Wall.NETWORK, Wall.RULES), "abstract-names"),
    **like(Wall.STOP, "continue-group", "wake-together", proof=proofs.busy),
}
_STORE = (Wall.FILES, Wall.USER)
_RUN = (Wall.RUN, Wall.FILES, Wall.USER)
_LOCKS = {
    **like(_RUN, "flock-run", "lock-run", "ofd-lock-run", "dnotify-run", "read-agents", "list-run"),
    **like(Wall.RUN, "flock-others", "lock-others", "ofd-lock-others", "dnotify-others"),
    **like((*_RUN, Wall.CALLS), "inotify-run"),
    **like((Wall.RUN, Wall.CALLS), "inotify-others"),
    **like((*_STORE, Wall.CALLS), "inotify-store"),
    **like(Wall.RUN, "read-output", "read-jobs"),
    **like((*_RUN, Wall.POWERS), "lease-run"),
    **like(Wall.RUN, "lease-others"),
    **like(_STORE, "flock-store", "lock-store", "ofd-lock-store", "lease-store"),
    **like((*_RUN, Wall.RULES), "link-others", "rename-others", "append-others", "change-others"),
}
_RACES = {
    **like(Wall.READER, "race-result", "race-checkpoint", "race-plan", "race-output", proof=proofs.busy),
    **like(Wall.READER, "folder-names", proof=proofs.many_files(500)),
    **like(Wall.READER, "folder-deep", proof=proofs.deep_folders),
    **like(Wall.READER, "folder-huge", proof=proofs.many_files(8000)),
    **like(Wall.READER, "folder-sparse", proof=proofs.big_file),
    **like(Wall.READER, "folder-loops", proof=proofs.there("self", "up", "all")),
    **like(Wall.READER, "folder-odd", proof=proofs.there("socket", "pipe", "closed")),
    **like((*_RUN, Wall.RULES), "folder-beside"),
    **like(Wall.READER, "folder-program", proof=proofs.there("program")),
}
_FUTEXES = {
    name: Control((wall,), prepared=proofs.listening(page), proof=proof)
    for page in ("control", "gate")
    for name, wall, proof in (
        (f"requeue-{page}", Wall.CALLS, None),
        (f"cmp-requeue-{page}", Wall.CALLS, None),
        (f"requeue-2-{page}", Wall.CALLS, None),
        (f"wait-many-{page}", Wall.CALLS, None),
        (f"wake-op-{page}", Wall.PAGES, None),
        (f"crowd-{page}", Wall.CARE, proofs.says("200 sleep")),
        (f"storm-{page}", Wall.CARE, proofs.woken),
    )
}
_MEMORY = {
    **like(
        (Wall.MEMORY, Wall.CALLS, Wall.LIMITS),
        *("memory-system-v", "memory-deleted-files", "memory-in-flight", "memory-in-cycles", "memory-shared-memory"),
        *("memory-page-tables", "memory-children-memory", "memory-stacks", "memory-freed"),
        "memory-moments",
        proof=proofs.says("400 MiB"),
    ),
    **like((Wall.LIMITS, Wall.USER, Wall.POWERS, Wall.CALLS), "memory-pipes", "memory-secret"),
    **like(Wall.MEMORY, "memory-sockets", "memory-areas", "memory-attributes"),
    **like(
        (Wall.MEMORY, Wall.CALLS, Wall.LIMITS, Wall.FILES, Wall.RULES),
        "memory-zero-device",
        proof=proofs.says("400 MiB"),
    ),
    **like(Wall.LIMITS, "memory-huge", impossible="huge pages would have to be reserved on the whole machine"),
}
CONTROLS = {
    **_PROCFS,
    **_TRICKS,
    **_LOCKS,
    **_RACES,
    **_FUTEXES,
    **like(Wall.PAGES, "lock-pi-control", "lock-pi-2-control", "lock-pi-gate", "lock-pi-2-gate"),  # nobody sleeps there
    **like(Wall.READER, "robust-baton", proof=proofs.page_changes("baton")),
    **_MEMORY,
}

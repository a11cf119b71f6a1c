"""All attacks that a side task commits, by name, and their families."""

from __future__ import annotations

from tests.chaos.attacks import (
    files,
    futexes,
    kernel,
    locks,
    memory,
    network,
    pages,
    processes,
    procfs,
    races,
    resources,
    scheduling,
    tricks,
    words,
)

_MODULES = (
    *(processes, procfs, scheduling, kernel, tricks, files, locks, races, pages, futexes, words, memory),
    *(resources, network),
)
FAMILIES = {module.__name__.rpartition(".")[2]: module.ATTACKS for module in _MODULES}
ATTACKS = {attack.kind.name: attack for family in FAMILIES.values() for attack in family}

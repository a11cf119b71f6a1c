"""All attacks that a side task commits, by name, and the families that they come in."""

from __future__ import annotations

from megatron.fill.chaos.attacks import files, kernel, network, pages, processes, resources, scheduling, words

_MODULES = (processes, scheduling, kernel, files, pages, words, resources, network)
FAMILIES = {module.__name__.rpartition(".")[2]: module.ATTACKS for module in _MODULES}
ATTACKS = {attack.kind.name: attack for family in FAMILIES.values() for attack in family}

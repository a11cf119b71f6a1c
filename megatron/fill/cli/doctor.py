"""``pipefill doctor``: this machine's means to protect the training from jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from megatron.fill.cli.options import Json
from megatron.fill.cli.views import print_json
from megatron.fill.console import console_of
from megatron.fill.display import plain_table
from megatron.fill.errors import SandboxError
from megatron.fill.sandbox.probe import Layer

if TYPE_CHECKING:
    from megatron.fill.device.doctor import Diagnosis

_PIPE_WIDTH = 80  # columns, if the output does not go to a terminal
_COLOURS = {"yes": "green", "partly": "yellow", "no": "red"}


def doctor(as_json: Json = False) -> None:
    """Show the isolation layers that this machine has for jobs' sandboxes, and the enforcement of each limit.

    --json prints an object: sandbox (its layers: name, keeps, lacks: why it is missing), abilities (name, has: yes,
    partly or no, detail), bindings (limit, uses, instead: why nothing better) and notes (faults not contained).
    """
    from megatron.fill.agent.sandbox import find_support, why_no_cuda_for_jobs
    from megatron.fill.device.doctor import diagnose
    from megatron.fill.device.probes import gather

    facts = gather()
    try:
        user, found = find_support()
        layers = found.layers
        if facts.gpus:
            facts = replace(facts, cuda_lacks=why_no_cuda_for_jobs(user, found.namespaces))
    except SandboxError as error:  # the rest of the diagnosis is still printed
        layers = (Layer("all of them", "", str(error)),)
    diagnosis = diagnose(facts)
    if as_json:
        print_json({"sandbox": [asdict(layer) for layer in layers], **asdict(diagnosis)})
    else:
        _print(diagnosis, layers)


def _print(diagnosis: Diagnosis, layers: Sequence[Layer]) -> None:
    from rich.padding import Padding
    from rich.text import Text

    console = console_of(_PIPE_WIDTH)
    table = plain_table("SANDBOX", "", "WHAT IT DOES")
    for layer in layers:
        has, said = ("no", f"missing: {layer.lacks}") if layer.lacks else ("yes", layer.keeps)
        table.add_row(layer.name, Text(has, _COLOURS[has]), Text(said))
    console.print(table)
    console.print()
    table = plain_table("THIS MACHINE", "", "")
    for ability in diagnosis.abilities:
        table.add_row(ability.name, Text(ability.has, _COLOURS[ability.has]), Text(ability.detail))
    console.print(table)
    console.print()
    table = plain_table("LIMIT", "KEPT BY", "NOTHING BETTER, SINCE")
    for binding in diagnosis.bindings:
        table.add_row(binding.limit, Text(binding.uses), Text(binding.instead))
    console.print(table)
    if diagnosis.notes:
        console.print("\nNOT CONTAINED", style="bold")
        for note in diagnosis.notes:
            console.print(Padding(Text(f"- {note}"), (0, 0, 0, 2)))

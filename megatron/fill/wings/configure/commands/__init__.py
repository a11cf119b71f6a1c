"""The commands of ``pipefill`` about layouts and their clusters."""

from __future__ import annotations

from megatron.fill.cli.typed import App
from megatron.fill.wings.configure.commands import configure, memory, network


def add(app: App) -> None:
    panel = "Parallel configurations"
    app.command("configure", rich_help_panel=panel)(configure.configure)
    app.command("pays", rich_help_panel=panel)(configure.pays)
    app.command("network", rich_help_panel=panel)(network.network)
    app.command("memory-model", rich_help_panel=panel)(memory.memory_model)

"""The commands of ``pipefill`` about language models."""

from __future__ import annotations

from megatron.fill.cli.typed import App
from megatron.fill.wings.llm.commands import batch, evaluate, speccheck


def add(app: App) -> None:
    panel = "Language models"
    app.command("batch", rich_help_panel=panel)(batch.batch)
    app.command("evaluate", rich_help_panel=panel)(evaluate.evaluate)
    app.command("speccheck", rich_help_panel=panel)(speccheck.speccheck)

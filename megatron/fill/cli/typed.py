"""The class of ``pipefill`` and of its groups of commands."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

__all__ = ["App", "Group"]


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> Any:
        return _switches_without_type(super().get_params(ctx))


class Group(TyperGroup):
    def get_params(self, ctx: Any) -> Any:
        return _switches_without_type(super().get_params(ctx))


def _switches_without_type(options: list[Any]) -> list[Any]:
    """Remove ``<bool>`` from switches in the help, which would look as if they took a value."""
    for option in options:
        if getattr(option, "is_flag", False) and option.metavar is None:
            option.metavar = ""
    return options


class App(typer.Typer):
    def command(self, name: str | None = None, **options: Any) -> Any:
        return super().command(name, **{"cls": _Command} | options)

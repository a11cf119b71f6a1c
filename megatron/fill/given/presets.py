"""Fields of a file that take the name of something known, or its fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BeforeValidator


def preset(presets: Mapping[str, Any]) -> BeforeValidator:
    """A name stands for what it names; anything else is left to the field's own type."""

    def choose(value: object) -> object:
        if not isinstance(value, str):
            return value
        if value not in presets:
            raise ValueError(f"expected one of {', '.join(presets)}, or its fields")
        return presets[value]

    return BeforeValidator(choose)

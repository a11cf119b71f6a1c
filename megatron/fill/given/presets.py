"""Fields of a file that take either the name of a preset or the fields themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BeforeValidator


def preset(presets: Mapping[str, Any]) -> BeforeValidator:
    """Return a validator that replaces a preset's name by the preset; other values are left to the field's own type."""

    def choose(value: object) -> object:
        if not isinstance(value, str):
            return value
        if value not in presets:
            raise ValueError(f"expected one of {', '.join(presets)}, or its fields")
        return presets[value]

    return BeforeValidator(choose)

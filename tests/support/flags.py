"""A parsed command line."""

from __future__ import annotations

import json
from argparse import Namespace

from megatron.fill.config import FillSettings


def flags(**changed: object) -> Namespace:
    """The parsed command line with these settings: those that are no flags are in ``--fill-settings``."""
    names = FillSettings.flags()
    values: dict[str, object] = {name: field.default for name, field in names.items()} | {"jobs": None}
    others = {name: value for name, value in changed.items() if name not in names}
    values |= {name: value for name, value in changed.items() if name in names}
    values["settings"] = [json.dumps(others)] if others else None
    return Namespace(bf16=False, fp16=False, **{f"fill_{name}": value for name, value in values.items()})

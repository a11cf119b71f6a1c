"""Write the tables of docs/report.md, the fields of report.json, from the models of that file.

python scripts/report_page.py
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

from pydantic import BaseModel

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.fill.report import schema  # noqa: E402

PAGE = ROOT / "docs" / "report.md"
HEAD = """## The fields of report.json

Names end in their unit: `_s`, `_ms`, `_us`, `_ns`, `_bytes`. These tables are made by `python scripts/report_page.py`.
"""
FILES = (schema.Report, schema.Cycles)  # whose content is a whole file
# Where other pages say more.
LINKS = {
    "a fixed word": "jobs.md#states-and-causes",
    "by use": "#what-the-figures-mean",
    "between trainings": "operate.md#between-two-trainings",
    "isolation layer": "isolation.md",
    "without a training": "operate.md#between-two-trainings",
    "outside the pipeline": "profiler.md#filled",
    "Megatron's own timers": "profiler.md#beside-megatrons-own-timers",
    "others waited for": "profiler.md#who-was-late",
    "others of their group waited for": "profiler.md#who-was-late",
    "the ranks waited for": "profiler.md#what-a-wait-was-for",
    "another one waited for": "profiler.md#what-a-wait-was-for",
    "what it went to": "profiler.md#the-names",
}
NAMES: dict[Any, str] = {str: "text", type(None): "null"}


def tables() -> str:
    """The part of the page from the head of the tables on."""
    found: dict[type[BaseModel], None] = {}
    for model in FILES:
        _collect(model, found)
    return "\n".join([HEAD, *map(_table, found)])


def page() -> str:
    """The page's text."""
    return PAGE.read_text(encoding="utf-8").partition(HEAD.splitlines()[0])[0] + tables()


def _collect(model: type[BaseModel], found: dict[type[BaseModel], None]) -> None:
    """Add the model, those that it inherits from, and those of its fields."""
    if model not in found and not model.__name__.startswith("_") and model is not BaseModel:
        found[model] = None
        for base in model.__bases__:
            _collect(base, found)
        for name in _own(model):
            for part in _parts(model.model_fields[name].annotation):
                if isinstance(part, type) and issubclass(part, BaseModel):
                    _collect(part, found)


def _parts(kind: Any) -> Iterator[Any]:
    yield kind
    for part in get_args(kind):
        yield from _parts(part)


def _own(model: type[BaseModel]) -> list[str]:
    return [name for name in model.model_fields if name in model.__annotations__]


def _table(model: type[BaseModel]) -> str:
    base = model.__base__
    more = "" if base is None or base.__name__.startswith("_") else f" It has all of {_type(base)}, and:"
    rows = [
        f"| `{name}` | {_type(field.annotation)} | {_marked(field.description or '', model)} |"
        for name in _own(model)
        for field in [model.model_fields[name]]
    ]
    text = _marked((inspect.getdoc(model) or "").replace("``", "`"))
    return "\n".join(
        [f"### {model.__name__}\n\n{text}{more}\n\n| field | type | meaning |\n| --- | --- | --- |", *rows, ""]
    )


def _type(kind: Any) -> str:
    """A type as a reader of JSON calls it."""
    origin, parts = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return f"[{kind.__name__}](#{kind.__name__.lower()})"
    if isinstance(kind, UnionType):
        return " or ".join(map(_type, parts))
    if origin is list:
        return f"list of {_type(parts[0])}"
    if origin is tuple:
        return f"[{', '.join(map(_type, parts))}]"
    if origin is dict:
        return "object" if parts[1] is Any else f"text to {_type(parts[1])}"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "text"
    return NAMES.get(kind) or str(kind.__name__)


def _marked(text: str, model: type[BaseModel] | None = None) -> str:
    """Text with flags and names of fields as code, and links."""
    for words, link in LINKS.items():
        text = re.sub(rf"\b{words}\b", f"[{words}]({link})", text, count=1)
    names = "|".join(name for name in (model.model_fields if model else ()) if "_" in name)
    text = re.sub(rf"(?<![\w`/-])(--[\w-]+(?: \d)?{'|' + names if names else ''})\b(?!\()", r"`\1`", text)
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

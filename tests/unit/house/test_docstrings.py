"""Docstrings of product and fault campaign, and the lines of attributes and arguments in them, name the thing first."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
# A relative clause, a partitive or a pronoun in the place of the noun: "What a job printed" for "The job's output".
FIRST = {"None", "Nobody", "Nothing", "Of", "One", "How", "That", "What", "Where", "Whether"}
FIRST |= {"Which", "Who", "Whom", "Whose", "Why"}
ENTRY = re.compile(r" {4}\*{0,2}\w[\w, ]*: (\w+)")  # ``name: text`` in a section


def covered() -> list[Path]:
    files = [*(ROOT / "megatron/fill").rglob("*.py"), *(ROOT / "pipefill_patches").glob("*.py")]
    files += (ROOT / "tests" / "chaos").rglob("*.py")
    return sorted([*files, ROOT / "pretrain_gpt.py"])


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """The line and the text of each docstring."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def entries(text: str) -> Iterator[str]:
    """The first words of the lines of ``Attributes`` and ``Args``."""
    inside = False
    for line in text.splitlines():
        if line and not line.startswith(" "):
            inside = line in ("Attributes:", "Args:")
        elif inside and (entry := ENTRY.match(line)):
            yield entry[1].capitalize()


def faults(source: str) -> Iterator[tuple[int, str]]:
    """The line of a docstring and the word that should not be where it is."""
    for line, text in docstrings(source):
        first = re.match(r"\W*(\w*)", text)
        if first is not None and first[1] in FIRST:
            yield line, first[1]
        yield from ((line, word) for word in entries(text) if word in FIRST - {"None", "One"})


def test_docstrings_name_the_thing_first():
    files = covered()
    assert len(files) > 200
    found = {
        f"{file.relative_to(ROOT)}:{line}: {word} ..."
        for file in files
        for line, word in faults(file.read_text(encoding="utf-8"))
    }
    assert found == set(), 'name the thing: "The job\'s output", "True if ...", "Return ..."; see CONTRIBUTING.md'


def test_a_relative_clause_in_place_of_the_noun_is_found():
    source = '''
"""Whether it works."""
class Pool:
    """A pool.

    Attributes:
        size: how many workers there are.
        free: number of idle workers.
        one, two: of the first ones.

    What follows a section is prose: of no concern here.
    """
    def get(self, *names):
        """``what`` and nothing else.

        Args:
            *names: one or more names.

        Raises:
            KeyError: what is asked for is not there.
        """
'''
    assert list(faults(source)) == [(2, "Whether"), (4, "How"), (4, "Of")]

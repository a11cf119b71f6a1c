"""The documentation: its links lead somewhere, its index is whole, and what it quotes is what is said."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import flags_page, report_page

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def anchors(page: Path) -> set[str]:
    """Of the headings, as they are made by all who show Markdown."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http:", "https:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_index_has_every_page():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", index))
    assert linked == {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}


def defined(file: Path) -> set[str]:
    """The functions and classes of a file, and ``Class.method``."""
    found = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
            found |= {f"{node.name}.{part.name}" for part in ast.walk(node) if isinstance(part, ast.FunctionDef)}
    return found


def test_where_the_design_says_that_a_function_is_it_is():
    section = (ROOT / "docs" / "design.md").read_text(encoding="utf-8").split("## Where is")[1].split("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| ") and "`" in line]
    assert len(rows) >= 10
    for _, question, place, function, _ in rows:
        files = [
            ROOT / path if "/" in path and (ROOT / path).exists() else ROOT / "megatron/fill" / path
            for path in re.findall(r"`([\w/.]+\.py)`", place)
        ]
        there = set().union(*map(defined, files))
        named = {name for name in re.findall(r"`([\w.]+)`", function) if not name.isupper()}
        assert named, question
        assert named <= there, question


def test_the_path_of_a_job_is_short_and_what_it_names_is_there():
    section = (
        (ROOT / "docs" / "design.md").read_text(encoding="utf-8").split("## The path of a job")[1].split("\n## ")[0]
    )
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| ") and "`" in line]
    files: set[str] = set()
    for _, number, station, place, _ in rows:
        files |= set(re.findall(r"`([\w/]+\.py)`", place))
        there = set().union(*(defined(ROOT / "megatron/fill" / file) for file in files))
        assert set(re.findall(r"`(\w+(?:\.\w+)?)`", station)) - {"Work"} <= there, number
    assert len(rows) <= 20
    assert len(files) <= 12


def test_what_contributors_are_pointed_to_is_there():
    section = (
        (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Where a change goes")[1].split("\n## ")[0]
    )
    places = set(re.findall(r"`([\w/*]+(?:/|\.py))`", section))
    assert len(places) > 20
    folders = (ROOT, ROOT / "megatron/fill", ROOT / "tests/unit")
    assert {place for place in places if not any(any(folder.glob(place)) for folder in folders)} == set()


def test_a_wrong_call_of_the_script_that_builds_the_site_is_refused():
    done = subprocess.run([ROOT / "scripts/docs.sh", "--serv"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "docs.sh: unknown argument --serv (see --help)\n")


def said() -> Iterator[str]:
    """Every text in the code; what is filled into one is left out."""
    files = [ROOT / "pretrain_gpt.py", *(ROOT / "megatron").rglob("*.py"), *(ROOT / "pipefill_patches").glob("*.py")]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "{}".join(str(part.value) for part in node.values if isinstance(part, ast.Constant))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
    for script in (ROOT / "scripts").glob("*.sh"):
        yield script.read_text(encoding="utf-8")


def test_messages_that_are_explained_are_said():
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8").split("## Where to look")[0]
    firsts = [line.split("|")[1] for line in page.splitlines() if line.startswith("| ")]
    quoted = {text for first in firsts for text in re.findall(r"`([^`]+)`", first)}
    texts = "\n".join(said())
    assert len(quoted) > 20
    assert {text for text in quoted if text not in texts} == set()


@pytest.mark.parametrize("made", [flags_page, report_page], ids=["flags", "report"])
def test_a_page_that_is_made_of_the_code_is_as_it_says(made):
    assert made.PAGE.read_text(encoding="utf-8") == made.page(), made.__doc__

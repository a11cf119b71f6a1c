"""The door to what a job can write: whatever it wrote, its reader gets a harmless value or a plain refusal."""

from __future__ import annotations

import json
import math
import os
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.fill import untrusted

DEEP = "[" * 100_000 + "]" * 100_000


def test_a_plain_file_is_read(tmp_path):
    (tmp_path / "file").write_text('{"a": [1, 2.5, null]}')
    assert untrusted.read_text(tmp_path / "file") == '{"a": [1, 2.5, null]}'
    assert untrusted.read_json(tmp_path / "file") == {"a": [1, 2.5, None]}


def test_links_pipes_folders_and_floods_are_not(tmp_path):
    (tmp_path / "secret").write_text("1")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")  # to open it would block for ever
    (tmp_path / "flood").write_bytes(b"x" * 100)
    for name in ("link", "zero", "pipe", "folder", "nothing"):
        with pytest.raises(OSError):  # noqa: PT011
            untrusted.read_text(tmp_path / name)
    with pytest.raises(ValueError, match="larger than 10 bytes"):
        untrusted.read_text(tmp_path / "flood", 10)
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match="is larger than"):
        untrusted.read_json(tmp_path / "sparse")


def test_a_folder_that_became_a_link_is_not_entered(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("1")
    (tmp_path / "job").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="job"):
        untrusted.read_text(tmp_path / "job" / "file")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("NaN", "NaN is not a JSON number"),
        ("[-Infinity]", "-Infinity is not a JSON number"),
        ("1e400", "1e400 is larger than any number"),
        (str(2**63), "9223372036854775808 is a whole number of more than 64 bits"),
        ("-" + "1" * 5000, "-1{39} is a whole number of more than 64 bits"),
        (r'{"a": {"prompt": "b\ud800"}}', r"""half a character .* after '{"a": {"prompt": "b'"""),
        (r'{"\udfff": 1}', "half a character"),
        ("[" * 33 + "]" * 33, "nested deeper than 32"),
        (DEEP, "nested deeper than 32"),
        ('{"a":' * 100_000, "nested deeper than 32"),
        ("[" + "1," * 1_000_001 + "1]", "more than 1000000 values"),
        ('{"a": 1, "a": 1}', "is there twice in one object"),
        ("", "Expecting value"),
        ("[1", "delimiter"),
        (b"\xff", "utf-8"),
    ],
    ids=range(15),
)
def test_what_would_break_a_reader_is_refused(text, expected):
    with pytest.raises(ValueError, match=expected):
        untrusted.parse_json(text)


def test_what_only_looks_so_is_taken():
    text = json.dumps(["[" * 100, '\\"[' * 50, "\\", "é", 2**63 - 1, -(2**63), 1e300, "\U0001f680"])
    assert untrusted.parse_json(text) == json.loads(text)
    assert untrusted.parse_json("[" * 32 + "]" * 32) == json.loads("[" * 32 + "]" * 32)


def test_a_reader_deep_in_the_stack_is_refused_too():
    def down(levels: int) -> object:
        return down(levels - 1) if levels else untrusted.parse_json("[" * 32 + "]" * 32)

    depth = sys.getrecursionlimit()
    outcomes = set()
    for levels in range(depth - 200, depth):
        try:
            outcomes.add(type(down(levels)))
        except (ValueError, RecursionError) as error:  # RecursionError: down() itself went too deep
            outcomes.add(type(error))
    assert list in outcomes


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(st.characters()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters()), inner),
    max_leaves=20,
)


@given(json_values)
def test_what_a_task_reports_is_made_fit_to_be_read(value):
    text = untrusted.to_json(value)
    assert untrusted.to_json(untrusted.parse_json(text)) == text
    text.encode()


def test_numbers_that_are_none_become_null():
    assert untrusted.to_json({"loss": math.nan, "worst": math.inf, "huge": 10**400, "big": 10**20}) == (
        '{"loss": null, "worst": null, "huge": null, "big": 1e+20}'
    )
    assert untrusted.to_json("a\ud800") == '"a?"'
    holds_itself: list[object] = []
    holds_itself.append(holds_itself)
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    for wrong in (holds_itself, deep, json.loads("[" * 33 + "]" * 33)):
        with pytest.raises(ValueError, match=r"deep|Circular"):
            untrusted.to_json(wrong)
    with pytest.raises(TypeError):
        untrusted.to_json({"a": object()})


@settings(max_examples=300)
@given(st.binary(max_size=60) | st.text(max_size=60) | st.text('[]{}",:\\0123456789.eE+-ud8NaInfity tr', max_size=60))
def test_any_bytes_give_a_value_or_a_value_error(text):
    try:
        value = untrusted.parse_json(text)
    except ValueError:
        return
    json.dumps(value, allow_nan=False, ensure_ascii=False).encode()

"""What users give is read as plain data, with lines; files that would break a reader are in wrong_files.py."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from functools import partial

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.fill.errors import ConfigError
from megatron.fill.given import plainyaml
from megatron.fill.given.files import read_json, read_text, read_yaml
from megatron.fill.given.plainyaml import READER, PlainYamlError, parse_yaml
from megatron.fill.given.problems import shown
from megatron.fill.given.quantities import parse_bytes, parse_deadline, parse_duration

TEXT = """\
defaults: &d
  task: m:C
  args: {rate: 1e-4}
jobs:
  - {<<: *d, name: a}
  - <<: [{priority: 1}, *d]
    name: b
    args: {}
same: *d
"""


@pytest.fixture(params=["libyaml", "without"])
def parse(request):
    return partial(parse_yaml, reader=READER if request.param == "libyaml" else yaml.SafeLoader)


def test_anchors_and_merges(parse):
    read = parse(TEXT)
    assert read.value["jobs"] == [
        {"name": "a", "task": "m:C", "args": {"rate": 0.0001}},
        {"name": "b", "args": {}, "priority": 1, "task": "m:C"},
    ]
    assert read.value["same"] == {"task": "m:C", "args": {"rate": 0.0001}}


def test_where_things_stand(parse):
    read = parse(TEXT)
    for path, line in (
        ([], None),
        (["nowhere"], None),
        (["jobs"], 4),
        (["jobs", 0], 5),
        (["jobs", 0, "task"], 2),  # what was merged stands where it came from
        (["jobs", 1, "name"], 7),
        (["jobs", 1, "args", "rate"], 8),
        (["jobs", 7], 4),
        (["same", "args", "rate"], 3),
    ):
        assert read.line_of(path) == line, path


def test_scalars(parse):
    text = "[2026-01-02, 2026-13-45T99:00, 1e-4, -1.5E+3, 1_000, 0x1F, 010, yes, off, ~, null, '7', !!str 7, =, 1e, .5]"
    assert parse(text).value == [
        *("2026-01-02", "2026-13-45T99:00", 0.0001, -1500.0, 1000, 31, 8, True, False, None, None, "7", "7", "="),
        *("1e", 0.5),
    ]


@pytest.mark.parametrize("text", ["", "# nothing", "---\n", "~"])
def test_nothing(parse, text):
    assert parse(text).value is None


def test_the_limits_are_those_that_are_said(parse):
    assert parse("[" * 32 + "]" * 32).value is not None
    with pytest.raises(PlainYamlError, match="nested deeper than 32 levels"):
        parse("[" * 33 + "]" * 33)
    below = "a: &a " + "[" * 20 + "]" * 20 + "\n"
    assert parse(below + "b: " + "[" * 11 + "*a" + "]" * 11).value is not None
    with pytest.raises(PlainYamlError, match="nested deeper than 32 levels"):
        parse(below + "b: " + "[" * 12 + "*a" + "]" * 12)
    assert parse(f"[{2**64 - 1}, {-(2**64) + 1}]").value == [2**64 - 1, -(2**64) + 1]


def no_number(text: str) -> bool:
    """PyYAML writes ``1e3`` without quotes, for YAML 1.1 knows no number without a point; we read one there."""
    return not plainyaml._EXPONENT.fullmatch(text)


data = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs", "Cc"])).filter(no_number),
    lambda inner: st.lists(inner) | st.dictionaries(st.text("abc<é 1~", max_size=3), inner),
    max_leaves=20,
)


@given(data, st.sampled_from([None, True, False]))
def test_what_yaml_writes_is_read_back(value, style):
    text = yaml.safe_dump(value, default_flow_style=style, allow_unicode=True)
    assert parse_yaml(text).value == value


@settings(max_examples=300)
@given(st.text(max_size=60) | st.text("[]{}&*a:b ,\n-?|>'\"!<1e.~#%@\\", max_size=60))
def test_any_text_is_read_or_refused(text):
    try:
        parse_yaml(text)
    except PlainYamlError:
        return


def test_files(tmp_path):
    path = tmp_path / "given"
    path.write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read_yaml(path, "something").value == {"a": 1}
    path.write_text('{"a": 1}')
    assert read_json(path, "something") == {"a": 1}
    with pytest.raises(ConfigError, match=r"given: is larger than 0 MiB; expected a word"):
        read_text(path, "a word", most_bytes=4)
    with pytest.raises(ConfigError, match="cannot be read: embedded null byte; expected a word"):
        read_text("a\0b", "a word")
    with pytest.raises(ConfigError, match="/dev/zero: is larger than 32 MiB; expected YAML"):
        read_yaml("/dev/zero", "YAML")


@pytest.mark.parametrize("value", ["9" * 400 + "GiB", "1" + "0" * 30, "1e400", "inf", "-1", "0.5", True, None])
def test_impossible_sizes(value):
    with pytest.raises(ValueError, match="expected a size above 0"):
        parse_bytes(value)


@pytest.mark.parametrize("value", ["9" * 400 + "h", "0000-01-01", "inf", "nan", "-1s", "5", "", "2026-02-30", None])
def test_impossible_deadlines(value):
    with pytest.raises(ValueError, match="expected such as 90s"):
        parse_deadline(value)


def test_far_deadlines_are_kept():
    assert parse_deadline("9999-12-30") < 1e12
    assert parse_deadline("1000d") == pytest.approx(time.time() + 86_400_000, abs=60)


@pytest.mark.parametrize("text", ["9" * 400 + "h", "inf", "nan", "-1", "1e400", "1 week", ""])
def test_impossible_durations(text):
    with pytest.raises(ValueError, match="expected seconds, or such as 90s"):
        parse_duration(text)


def test_what_is_shown_is_short():
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    for value in (deep, "x" * 100_000, list(range(100_000)), {str(n): n for n in range(100_000)}):
        assert len(shown(value)) <= 60
    assert shown("a'b") == '"a\'b"'


def test_a_pipe_is_read_to_the_end_of_its_writers(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def write() -> None:
        with pipe.open("w") as file:
            for part in ("a: ", "1"):
                time.sleep(0.05)
                file.write(part)
                file.flush()

    writer = threading.Thread(target=write)
    writer.start()
    assert read_yaml(pipe, "something").value == {"a": 1}
    writer.join()


def test_a_pipe_that_nobody_writes_into_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    code = "from megatron.fill.given import files; files._WRITER_S = 0.1; files.read_text({!r}, 'a word')"
    done = subprocess.run(  # one that waited would not even hear a time limit of this process
        [sys.executable, "-c", code.format(str(tmp_path / "pipe"))], capture_output=True, text=True, timeout=60
    )
    assert "pipe: cannot be read: it is a pipe, and nobody writes into it; expected a word" in done.stderr

"""Every wrong call, flag and file is answered by one line, exit code 2, and nothing else."""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import operator
import re
import shlex
import sys
from pathlib import Path

import pytest

from megatron.fill.app.launch import Launch
from megatron.fill.cli import main
from megatron.fill.errors import RANK_0_S, FillError
from megatron.fill.given.plainyaml import parse_yaml
from megatron.fill.store import open_store
from megatron.fill.work import NewJob, Work
from pipefill_patches.arguments import add_fill_arguments, tell_briefly
from tests.support import wrong_calls, wrong_files

ROOT = Path(__file__).resolve().parents[3]
MOST_LETTERS = 380  # the list of all fields of a layout has the most
PLACE = re.compile(r"/\S*/pytest-\d+/(popen-gw\d+/)?[^/\s]+/")  # pytest's folders, however long their paths


def pairs(table: str) -> list[tuple[str, str]]:
    found = [tuple(line.split(" => ")) for line in table.strip().splitlines()]
    assert all(len(pair) == 2 for pair in found)
    return found  # type: ignore[return-value]


CALLS, FLAGS, JOBS, FIELDS = map(pairs, (wrong_calls.CALLS, wrong_calls.FLAGS, wrong_files.JOBS, wrong_files.FIELDS))


SCRIPTS = pairs(wrong_calls.SCRIPTS)


def test_there_are_enough():
    assert len(CALLS) + len(FLAGS) + len(JOBS) + len(FIELDS) + len(wrong_files.TEXTS) >= 200


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wrong")
    files = {
        "jobs.yaml": "jobs: [{name: a, command: ls}]\n",
        "twice.yaml": "jobs:\n  - {name: a, command: ls, name: b}\n",
        "b.json": wrong_files.bubbles(),
        "own.csv": "0F0,0B0\n1F0,1B0\n",
        "wrong.csv": "0F0,0B0\n1F0,1Z0\n",
        "p.json": wrong_files.profiles(),
        "sim.yaml": (ROOT / "examples" / "simulate.yaml").read_text(encoding="utf-8"),
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "latin.yaml").write_bytes("jobs: [{name: é}]".encode("latin-1"))
    (folder / "folder").mkdir()
    store = open_store(folder / "s.db")
    store.submit([NewJob("a", Work(command=("ls",)))])
    store.close()
    return folder


@pytest.fixture
def told(place, monkeypatch, capsys):
    """What ``pipefill`` says to a wrong call: one line, without what it begins with."""
    monkeypatch.chdir(place)
    monkeypatch.delenv("PIPEFILL_STORE", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    before = sorted(place.iterdir())

    def call(arguments: list[str]) -> str:
        monkeypatch.setattr(sys, "argv", ["pipefill", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert (ended.value.code, out) == (2, "")
        return one_line(err.removeprefix("pipefill: error: "))

    yield call
    assert sorted(place.iterdir()) == before, "something was made"


def one_line(said: str) -> str:
    assert said.count("\n") == 1, said
    assert "Traceback" not in said
    assert len(PLACE.sub("", said)) <= MOST_LETTERS, said
    return said


@pytest.mark.parametrize(("call", "expected"), CALLS, ids=[call for call, _ in CALLS])
def test_a_wrong_call(told, call, expected):
    if "postgresql" in call:
        pytest.importorskip("psycopg")
    assert expected in told(shlex.split(call.format(long="x" * 5000)))


@pytest.mark.parametrize(("call", "text", "expected"), wrong_files.TEXTS, ids=range(len(wrong_files.TEXTS)))
def test_a_wrong_file(told, tmp_path, call, text, expected):
    path = tmp_path / "given"
    path.write_text(text, encoding="utf-8")
    said = told(shlex.split(call.format(path)))
    assert expected in said
    assert str(path) in said or "the name 'a' is in use" in said


@pytest.mark.parametrize(("job", "expected"), JOBS, ids=[job for job, _ in JOBS])
def test_a_wrong_job(told, tmp_path, job, expected):
    path = tmp_path / "jobs.yaml"
    path.write_text(f"jobs:\n  - {job}\n", encoding="utf-8")
    said = told(["submit", str(path), "--store", "s.db"])
    assert said.startswith(f"{path}, line ")
    assert expected in said


@pytest.mark.parametrize(("change", "expected"), FIELDS, ids=[change for change, _ in FIELDS])
def test_a_wrong_simulation(told, tmp_path, change, expected):
    field, _, value = change.partition(": ")
    lines = (ROOT / "examples" / "simulate.yaml").read_text(encoding="utf-8")
    path = tmp_path / "sim.yaml"
    try:
        found = parse_yaml(value).value
    except ValueError:
        path.write_text(f"{lines}\nextra: {value}\n", encoding="utf-8")
    else:
        data = parse_yaml(lines).value
        *places, last = [int(name) if name.isdecimal() else name for name in field.split(".")]
        functools.reduce(operator.getitem, places, data)[last] = found
        path.write_text(json.dumps(data), encoding="utf-8")
    assert expected in told(["simulate", str(path), "--processes", "1"])


@pytest.mark.parametrize(("flags", "expected"), FLAGS, ids=[flags for flags, _ in FLAGS])
def test_a_wrong_flag(told, capsys, flags, expected):
    parser = argparse.ArgumentParser("pretrain_gpt.py", allow_abbrev=False)
    tell_briefly(add_fill_arguments(parser))
    parser.set_defaults(bf16=False, fp16=False)
    with pytest.raises((SystemExit, FillError)) as ended:
        Launch().on_parse(parser.parse_args(shlex.split(flags)))
    out, err = capsys.readouterr()
    if isinstance(ended.value, FillError):  # launch() says it and exits with 2
        err += f"{ended.value}\n"
    else:
        assert isinstance(ended.value, SystemExit)
        assert ended.value.code == 2
    assert out == ""
    assert expected in one_line(err)


@pytest.mark.parametrize(("call", "expected"), SCRIPTS, ids=[call for call, _ in SCRIPTS])
def test_a_wrong_call_of_a_script(tmp_path, monkeypatch, capsys, call, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "r.json").write_text("{}", encoding="utf-8")
    before = sorted(tmp_path.iterdir())
    script, *arguments = shlex.split(call)
    module = importlib.import_module(f"scripts.benchmarks.{script.removesuffix('.py')}")
    monkeypatch.setattr(module, "why_not", lambda: "real-time priorities are refused here", raising=False)
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    with pytest.raises(SystemExit) as ended:
        module.main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert expected in " ".join(err.splitlines()[-1:])
    assert sorted(tmp_path.iterdir()) == before, "something was made"


@pytest.mark.parametrize("rank", ["0", "1"])
def test_other_ranks_let_the_first_say_what_is_wrong(told, monkeypatch, capsys, rank):
    """The launcher ends them as soon as it has; one that it does not end has an error of its own."""
    waited = []

    def sleep(seconds):
        waited.append(seconds)
        assert capsys.readouterr() == ("", "")

    monkeypatch.setattr("megatron.fill.errors.time.sleep", sleep)
    monkeypatch.setenv("RANK", rank)
    parser = argparse.ArgumentParser(allow_abbrev=False)
    tell_briefly(add_fill_arguments(parser))
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["--fill-overrun", "much"])
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert "--fill-overrun" in err
    assert waited == [RANK_0_S] * int(rank)

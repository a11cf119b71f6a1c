"""``pipefill batch --alone``: without a training and a store; killed and begun again, each request is answered once."""

from __future__ import annotations

import fcntl
import json
import os

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("greenlet")

from megatron.fill.cli import main
from megatron.fill.errors import ConfigError
from megatron.fill.wings.llm.alone import answer_alone, partial_path
from tests.support.small_models import folder, model
from tests.wings.llm.test_llm_batch import request, some_requests, write


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return folder(tmp_path_factory.mktemp("models") / "target", model())


def by_name(path):
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = {line["custom_id"]: line["response"] for line in lines}
    assert len(found) == len(lines)
    return found


def run(arguments, output, stop_at=None):
    """``stop_at``: answers after which it is interrupted."""
    partial = partial_path(output, arguments, b"")

    def progress(answered, tokens, seconds):
        if stop_at is not None and answered >= stop_at:
            raise KeyboardInterrupt

    return answer_alone(arguments, output, partial, "cpu", None, progress)


def test_interrupted_and_begun_again_each_request_is_answered_once(target, tmp_path):
    requests = write(tmp_path / "in.jsonl", some_requests(9))
    arguments = {"model": str(target), "requests": str(requests), "batch_sizes": [3]}
    before, whole_tokens, _ = run(arguments, tmp_path / "whole.jsonl")
    assert (before, whole_tokens > 9) == (0, True)
    output = tmp_path / "out.jsonl"
    partial = partial_path(output, arguments, b"")
    for stop_at in (2, 5):
        with pytest.raises(KeyboardInterrupt):
            run(arguments, output, stop_at)
        assert not output.exists()
        with partial.open("ab") as file:
            file.write(b'{"id": "batch_req_torn')
    before, rest_tokens, _ = run(arguments, output)
    assert before >= 5
    assert rest_tokens < whole_tokens
    assert not partial.exists()
    assert by_name(output) == by_name(tmp_path / "whole.jsonl")


def test_other_arguments_or_requests_begin_anew(tmp_path):
    output = tmp_path / "out.jsonl"
    paths = {partial_path(output, {"model": name}, data) for name in "ab" for data in (b"1", b"2")}
    assert len(paths) == 4
    assert {path.parent for path in paths} == {tmp_path}


def test_two_at_once_and_an_output_that_is_there_are_refused(target, tmp_path):
    arguments = {"model": str(target), "requests": str(write(tmp_path / "in.jsonl", some_requests(1)))}
    output = tmp_path / "out.jsonl"
    partial = partial_path(output, arguments, b"")
    fd = os.open(partial, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(ConfigError, match="is being written by another"):
        run(arguments, output)
    os.close(fd)
    output.touch()
    with pytest.raises(ConfigError, match="is there already"):
        run(arguments, output)
    assert not partial.exists()


def pipefill(monkeypatch, capsys, *arguments):
    monkeypatch.setattr("sys.argv", ["pipefill", "batch", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    written = capsys.readouterr()
    return int(ended.value.code or 0), written.out, written.err


def test_the_command_says_what_was_done(target, tmp_path, monkeypatch, capsys):
    lines = [*some_requests(3), request(9, prompt="abc", top_k=-5)]
    requests = write(tmp_path / "in.jsonl", lines)
    arguments = (requests, "--model", target, "--alone", "--device", "cpu", "--batch-size", "2")
    status, out, _ = pipefill(monkeypatch, capsys, *arguments)
    assert status == 0
    found = by_name(tmp_path / "in.answers.jsonl")
    assert len(found) == 4
    usage = [one["body"]["usage"] for one in found.values() if one["status_code"] == 200]
    assert f"{tmp_path / 'in.answers.jsonl'}: 4, 1 of them errors." in out
    assert f"{sum(one['completion_tokens'] for one in usage)} of answers: " in out
    (tmp_path / "in.answers.jsonl").unlink()
    status, out, _ = pipefill(monkeypatch, capsys, *arguments, "--json")
    said = json.loads(out)
    assert (said["requests"], said["refused"], said["answered"], said["failed"]) == (4, 1, 3, 1)
    assert said["prompt_tokens"] == sum(one["prompt_tokens"] for one in usage)
    assert said["tokens_per_s"] > 0
    assert by_name(tmp_path / "in.answers.jsonl") == found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--alone", "--watch"], "--watch makes no sense with --alone"),
        (["--alone", "--name", "x"], "--name makes no sense with --alone"),
        (["--alone", "--memory", "lots"], "--memory is 'lots'"),
        (["--alone", "--device", "cuda"], "--device is 'cuda'"),
        (["--alone", "--batch-size", "0"], "--batch-size"),
        (["--batch-size", "2"], "--batch-size is 2: expected --alone with it"),
        (["--device", "cpu"], "--device is cpu: expected --alone with it"),
    ],
)
def test_options_that_make_no_sense_are_refused(target, tmp_path, monkeypatch, capsys, arguments, message):
    requests = write(tmp_path / "in.jsonl", some_requests(1))
    status, _, err = pipefill(monkeypatch, capsys, requests, "--model", target, *arguments)
    assert status == 2
    assert message in " ".join(err.split())
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]

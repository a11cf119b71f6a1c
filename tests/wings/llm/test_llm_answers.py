"""Answers in OpenAI's batch format, and each request answered exactly once."""

from __future__ import annotations

import errno
import json
import math
import os
import tempfile
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.fill.wings.llm.answers import AnswerFile, Choice, TokenLogprob, answer, error_answer
from megatron.fill.wings.llm.requests import Refused, Request
from megatron.fill.wings.llm.sampling import Sampling


def request(line: int = 1, chat: bool = False, custom_id: str = "a") -> Request:
    messages = ({"role": "user", "content": "Hi"},) if chat else ()
    prompts = () if chat else ("Hi",)
    return Request(line, custom_id, chat, prompts, messages, (), {}, 1, 16, Sampling(1.0), None, (), None, None, None)


LOGPROBS = [
    TokenLogprob("é", -0.5, (("é", -0.5), ("x", -2.0), ("x", -3.0))),
    TokenLogprob("\udcc3", -math.inf, offset=1),
]


def test_a_completion() -> None:
    line = answer(request(), [Choice(0, "é", "stop", 2, LOGPROBS), Choice(1, "y", "length", 3)], 5, "m")
    body = line["response"]["body"]
    assert (line["custom_id"], line["error"], line["response"]["status_code"]) == ("a", None, 200)
    assert (body["object"], body["model"]) == ("text_completion", "m")
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10}
    first, second = body["choices"]
    assert second == {"index": 1, "text": "y", "logprobs": None, "finish_reason": "length"}
    assert first["logprobs"] == {
        "tokens": ["é", r"bytes:\xc3"],
        "token_logprobs": [-0.5, -9999.0],
        "top_logprobs": [{"x": -2.0, "é": -0.5}, {}],
        "text_offset": [0, 1],
    }


def test_a_chat() -> None:
    body = answer(request(chat=True), [Choice(0, "é", "stop", 2, LOGPROBS)], 5, "m")["response"]["body"]
    [choice] = body["choices"]
    assert body["object"] == "chat.completion"
    assert choice["message"] == {"role": "assistant", "content": "é", "refusal": None}
    first, second = choice["logprobs"]["content"]
    assert (first["bytes"], first["top_logprobs"][1]["token"]) == ([0xC3, 0xA9], "x")
    assert second == {"token": r"\xc3", "logprob": -9999.0, "bytes": [0xC3], "top_logprobs": []}


def test_a_wrong_request_is_answered_with_its_error() -> None:
    line = error_answer(Refused(3, None, "n is 0", "n"))
    assert (line["custom_id"], line["response"]["status_code"], line["error"]) == (None, 400, None)
    error = {"message": "n is 0", "type": "invalid_request_error", "param": "n", "code": None, "line": 3}
    assert line["response"]["body"] == {"error": error}


def test_ids_are_the_requests_own() -> None:
    asked = [request(), request(line=2), request(custom_id="b")]
    assert len({answer(one, [], 0, "m")["id"] for one in asked}) == 3
    assert answer(asked[0], [], 0, "m") == answer(request(), [], 0, "m")


ASKED = [request(line, custom_id=f"é{line}") for line in range(1, 5)]
LINES = [answer(one, [Choice(0, "text\n", "stop", 1)], 1, "m") for one in ASKED]
WHOLE = b"".join(json.dumps(line).encode() + b"\n" for line in LINES)


@given(st.integers(0, len(WHOLE)), st.binary(max_size=20))
def test_wherever_the_file_is_cut_each_request_is_answered_once(cut: int, torn: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "answers.jsonl"
        path.write_bytes(WHOLE[:cut] + torn.replace(b"\n", b"\0"))
        with closing(AnswerFile(path)) as file:
            assert len(file) <= WHOLE[:cut].count(b"\n") + 1
            for one, line in zip(ASKED, LINES, strict=True):
                if not file.answered(one):
                    file.write(line)
            file.sync()
        assert [json.loads(line) for line in path.read_bytes().splitlines()] == LINES


def test_what_comes_after_a_line_that_a_power_failure_lost_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    first, *rest = WHOLE.splitlines(keepends=True)
    path.write_bytes(first + b"\0" * 50 + b"\n" + b"".join(rest))
    with closing(AnswerFile(path)) as file:
        assert len(file) == 1
        assert file.answered(ASKED[0])
    assert path.read_bytes() == first


def test_a_request_is_not_answered_twice(tmp_path: Path) -> None:
    with closing(AnswerFile(tmp_path / "answers.jsonl")) as file:
        file.write(LINES[0])
        with pytest.raises(ValueError, match="answered already"):
            file.write(LINES[0])


def test_a_full_disk_leaves_no_torn_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, pwrite = tmp_path / "answers.jsonl", os.pwrite
    room = len(WHOLE.splitlines(keepends=True)[0]) + 30

    def into_what_is_left(fd: int, data: bytes, offset: int) -> int:
        if offset >= room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, data[: room - offset], offset)

    with closing(AnswerFile(path)) as file:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", into_what_is_left)
            file.write(LINES[0])
            with pytest.raises(OSError, match=r"No space left.*answers\.jsonl"):
                file.write(LINES[1])
        assert path.read_bytes() == WHOLE.splitlines(keepends=True)[0]
        assert not file.answered(ASKED[1])
        for line in LINES[1:]:
            file.write(line)
    assert path.read_bytes() == WHOLE

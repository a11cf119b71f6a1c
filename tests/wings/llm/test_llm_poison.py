"""Nothing that a line of a batch contains keeps the others from being answered."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.fill.wings.llm.answers import AnswerFile
from megatron.fill.wings.llm.requests import Request, read_requests
from tests.support.small_models import LETTERS, folder, model
from tests.wings.llm.poisonous_lines import POISON_ID, poisonous_lines
from tests.wings.llm.test_llm_batch import answers, job, run

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("greenlet")

TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'raise' %}{{ raise_exception('no') }}"
    "{% elif m.content == 'zero' %}{{ 1 / 0 }}{% elif m.content != 'nothing' %}{{ m.content }}{% endif %}{% endfor %}"
)
POISON = poisonous_lines()
BODIES: list[dict[str, Any]] = [{"prompt": "abc"}, {"prompt": "wxyz", "temperature": 0}, {"prompt": [7], "logprobs": 1}]
HONEST: list[dict[str, Any]] = [
    {"custom_id": f"h{at}", "method": "POST", "url": "/v1/completions", "body": body | {"max_tokens": 3, "seed": 5}}
    for at, body in enumerate(BODIES)
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model that gives NaN after the letter M, with a token that it has no row for, and a draft of fewer rows."""
    from transformers import AutoTokenizer

    where = tmp_path_factory.mktemp("models")
    made = model(layers=2)
    with torch.no_grad():
        made.get_input_embeddings().weight[LETTERS.index("M")] = float("nan")
    target, draft = folder(where / "target", made, TEMPLATE), model(noise=0.02, layers=2)
    draft.resize_token_embeddings(38)
    for one in (target, folder(where / "draft", draft)):
        tokenizer = AutoTokenizer.from_pretrained(one)
        tokenizer.add_tokens("~")
        assert tokenizer("~")["input_ids"] == [len(LETTERS)]
        tokenizer.save_pretrained(one)
    return target, where / "draft"


@pytest.fixture(scope="module")
def loaded(models):
    """Models are loaded and checked once."""
    from megatron.fill.wings.llm import models as module
    from megatron.fill.wings.llm import selfcheck

    load = module.load_language_model
    there: dict[Any, Any] = {}

    def load_once(path, dtype="auto"):
        return there.setdefault(path, load(path, dtype))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "load_language_model", load_once)
        for path in models:
            selfcheck.check_model(load_once(path)[0])
        patch.setattr(selfcheck, "check_model", lambda one: None)
        yield models


def with_honest_lines(path, poison):
    first, *others = (json.dumps(line).encode() for line in HONEST)
    path.write_bytes(b"\n".join([first, poison, *others]) + b"\n")
    return path


@pytest.fixture(scope="module")
def undisturbed(loaded, tmp_path_factory):
    where = tmp_path_factory.mktemp("undisturbed")
    path = where / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in HONEST))
    run(job(loaded, path, where / "job", batch_sizes=[4], pieces=1))
    return {name: body["body"]["choices"] for name, body in answers(where / "job").items()}


def test_there_are_200_kinds():
    assert len(POISON) >= 200
    assert not any(b"\n" in line for line in POISON.values())


@pytest.mark.parametrize("kind", POISON)
def test_honest_lines_are_answered_beside_every_poison(kind, loaded, undisturbed, tmp_path, caplog):
    caplog.set_level(logging.ERROR)
    path = with_honest_lines(tmp_path / "in.jsonl", POISON[kind])
    lines = read_requests(path)
    assert [line.line for line in lines] == [1, 2, 3, 4]
    assert [line.custom_id for line in lines if line.line != 2] == ["h0", "h1", "h2"]
    if not isinstance(lines[1], Request):  # it never reaches the model
        assert lines[1].message
        return
    made = job(loaded, path, tmp_path / "job", batch_sizes=[4], pieces=1)
    work, finished = run(made)
    assert finished
    assert work == pytest.approx(4)
    found = answers(tmp_path / "job")
    assert len(found) == 4
    for name, choices in undisturbed.items():
        assert found[name]["status_code"] == 200
        assert texts(found[name]["body"]["choices"]) == texts(choices)
    (poisoned,) = (one for name, one in found.items() if name not in undisturbed)
    if poisoned["status_code"] != 200:
        assert poisoned["body"]["error"]["line"] == 2
        assert poisoned["body"]["error"]["message"]


def texts(choices):
    return [(choice["text"], choice["finish_reason"]) for choice in choices]


@pytest.mark.parametrize("kind", [kind for kind in POISON if kind.startswith("NaN")])
def test_logits_that_are_no_numbers_are_an_error_of_that_request(kind, loaded, tmp_path):
    run(job(loaded, with_honest_lines(tmp_path / "in.jsonl", POISON[kind]), tmp_path / "job", batch_sizes=[4]))
    poisoned = answers(tmp_path / "job")[POISON_ID]
    assert poisoned["status_code"] == 500
    assert "not finite numbers (NaN or infinite) after 0 generated tokens" in poisoned["body"]["error"]["message"]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("an id beyond the embedding", "prompt has token 40, which the model does not know; expected 0 to 39"),
        ("an added token", "the tokens of the prompt have 40, which the model does not know"),
        ("a template without tokens", "gives no token for these messages"),
        ("a template that raises", "do not fit the model's chat template"),
        ("a template that divides by zero", "do not fit the model's chat template"),
    ],
)
def test_what_the_model_cannot_be_given_is_said(kind, said, loaded, tmp_path):
    run(job(loaded, with_honest_lines(tmp_path / "in.jsonl", POISON[kind]), tmp_path / "job", batch_sizes=[4]))
    poisoned = answers(tmp_path / "job")[POISON_ID]
    assert poisoned["status_code"] == 400
    assert said in poisoned["body"]["error"]["message"]


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_slot_is_clean_after_a_sequence_of_nan(loaded, undisturbed, tmp_path, temperature):
    """One slot only, so that every honest request follows a poisonous one there."""
    poison = {
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": "a" * 20 + "M", "temperature": temperature},
    }
    lines = [one for at, honest in enumerate(HONEST) for one in ({"custom_id": f"p{at}", **poison}, honest)]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run(job(loaded, path, tmp_path / "job", batch_sizes=[1]))
    found = answers(tmp_path / "job")
    assert [found[f"p{at}"]["status_code"] for at in range(3)] == [500] * 3
    for name in undisturbed:
        assert found[name]["status_code"] == 200


def test_a_request_that_nobody_foresaw_is_an_error_of_its_own(loaded, tmp_path, monkeypatch):
    from megatron.fill.wings.llm.tokenizers import FolderTokenizer

    encode, decode = FolderTokenizer.encode, FolderTokenizer.decode
    monkeypatch.setattr(FolderTokenizer, "encode", lambda self, text: 1 // (text != "abc") and encode(self, text))
    monkeypatch.setattr(
        FolderTokenizer, "decode", lambda self, tokens: 1 // (len(tokens) != 2) and decode(self, tokens)
    )
    short = {"prompt": "mnop", "max_tokens": 2, "temperature": 0}
    lines = [*HONEST, HONEST[1] | {"custom_id": "h3", "body": short}]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run(job(loaded, path, tmp_path / "job", batch_sizes=[4]))
    found = answers(tmp_path / "job")
    assert {name: one["status_code"] for name, one in found.items()} == {"h0": 500, "h1": 200, "h2": 200, "h3": 500}
    assert all("ZeroDivisionError" in found[name]["body"]["error"]["message"] for name in ("h0", "h3"))


@settings(max_examples=60)
@given(st.one_of(st.binary(max_size=200), st.text(max_size=100).map(str.encode)).filter(lambda data: b"\n" not in data))
def test_whatever_bytes_a_line_has_the_others_are_read(tmp_path_factory, data):
    path = with_honest_lines(tmp_path_factory.mktemp("any") / "in.jsonl", data)
    found = {line.custom_id: line for line in read_requests(path)}
    assert all(isinstance(found[f"h{at}"], Request) for at in range(3))


@pytest.mark.parametrize(
    "broken", ["temperature is NaN", "seed is 1234567890123456789", "a body twice", "torn at 100", "deep objects"]
)
def test_a_line_that_is_not_taken_keeps_its_id(broken, tmp_path):
    lines = read_requests(with_honest_lines(tmp_path / "in.jsonl", POISON[broken]))
    assert lines[1].custom_id == POISON_ID


def test_answers_are_there_while_others_are_generated_and_after_a_failure(loaded, tmp_path, monkeypatch):
    path = tmp_path / "in.jsonl"
    lines = [HONEST[at % 2] | {"custom_id": f"r{at}"} for at in range(6)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = job(loaded, path, tmp_path / "job", batch_sizes=[1])
    counts = set()
    for _ in range(10_000):
        try:
            made.run_next_step()
        except StopIteration:
            break
        counts.add(len((tmp_path / "job" / "answers.jsonl").read_bytes().splitlines()))
    assert counts >= {1, 2, 3, 4, 5}
    assert len(AnswerFile(tmp_path / "job" / "answers.jsonl")) == 6

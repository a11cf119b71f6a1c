"""``DraftTuning``: drafts trained on a large model's answers, each where those before it fail."""

from __future__ import annotations

import io
import json
import random
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.fill.errors import ConfigError, TaskError
from megatron.fill.sidetask.base import TaskContext
from megatron.fill.wings.llm.examples import NOT_LEARNT, Left, Windows, answered
from megatron.fill.wings.llm.models import load_language_model, load_tokenizer
from megatron.fill.wings.llm.tokenizers import ByteTokenizer
from tests.support.small_models import LETTERS, alone, folder, model

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("greenlet")

TOKENS = st.lists(st.integers(0, 9), min_size=1, max_size=70)


@given(st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=4), st.integers(2, 20), st.integers(1, 6))
def test_every_new_token_is_a_label_once(examples, length, span):
    windows = Windows(iter(examples), length, span)
    labels = windows.labels[windows.labels != NOT_LEARNT].tolist()
    assert labels == [token for _, new in examples for token in new]
    assert ((windows.spans >= 0) == (windows.labels != NOT_LEARNT)).all()
    # What a label follows is in the window, in the place before it.
    for inputs, targets in zip(windows.inputs, windows.labels, strict=True):
        places = np.flatnonzero(targets != NOT_LEARNT)
        assert (inputs[places[1:]] == targets[places[:-1]]).all()
    sizes = [int((row == at).sum()) for row, n in zip(windows.spans, windows.count, strict=True) for at in range(n)]
    assert all(1 <= size <= span for size in sizes)
    assert len(sizes) == windows.is_span().sum()


@given(st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_what_is_left_has_labels_of_no_span_that_is_done(examples, source):
    windows = Windows(iter(examples), 12, 3)
    done = ~windows.is_span() | (
        np.array([source.random() < 0.5 for _ in range(windows.is_span().size)]).reshape(windows.is_span().shape)
    )
    left = Left(windows, done)
    assert len(left) == (~done).any(1).sum()
    for inputs, target in (left[at] for at in range(len(left))):
        at = target["window"]
        for place, label in enumerate(target["labels"]):
            span = windows.spans[at, place]
            learnt = span >= 0 and not done[at, span]
            assert label == (windows.labels[at, place] if learnt else NOT_LEARNT)
        assert (target["labels"] != NOT_LEARNT).any()
        assert inputs["input_ids"].tolist() == windows.inputs[at].tolist()


def test_an_answer_follows_its_prompt_without_the_token_that_begins_a_text(tmp_path):
    from tokenizers import processors
    from transformers import AutoTokenizer

    where = folder(tmp_path / "model", model())
    tokenizer = AutoTokenizer.from_pretrained(where)
    end = len(LETTERS) - 1
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{LETTERS[-1]} $A", special_tokens=[(LETTERS[-1], end)]
    )
    tokenizer.save_pretrained(where)
    body = {"prompt": "ab", "max_tokens": 3}
    line = {"custom_id": "r", "method": "POST", "url": "/v1/completions", "body": body}
    choice = {"index": 0, "text": "cde", "finish_reason": "length"}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    given = {"custom_id": "r", "response": {"status_code": 200, "body": {"choices": [choice]}}}
    (tmp_path / "out.jsonl").write_text(json.dumps(given) + "\n")
    pairs = answered(str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), load_tokenizer(where))
    assert list(pairs) == [([end, 0, 1], [2, 3, 4])]


@pytest.fixture(scope="module")
def given_files(tmp_path_factory):
    """A large model's folder, requests, and its greedy answers, which are those of ``transformers``."""
    where = tmp_path_factory.mktemp("given")
    large = model()
    source = random.Random(3)
    with (where / "in.jsonl").open("w") as requests, (where / "answers.jsonl").open("w") as answers:
        for at in range(24):
            prompt = [source.randrange(len(LETTERS) - 1) for _ in range(source.randint(1, 9))]
            body = {"prompt": "".join(LETTERS[token] for token in prompt), "max_tokens": 20, "temperature": 0}
            line = {"custom_id": f"r{at}", "method": "POST", "url": "/v1/completions", "body": body}
            requests.write(json.dumps(line) + "\n")
            tokens = alone(large, prompt, 20)
            ended = len(LETTERS) - 1 in tokens
            text = "".join(LETTERS[token] for token in tokens).split(".")[0]
            choice = {"index": 0, "text": text, "finish_reason": "stop" if ended else "length"}
            response = {"status_code": 200, "body": {"choices": [choice]}}
            if at == 5:
                response = {"status_code": 400, "body": {"error": {"message": "no"}}}
            answers.write(json.dumps({"custom_id": line["custom_id"], "response": response}) + "\n")
    return folder(where / "large", large), where / "in.jsonl", where / "answers.jsonl"


def job(given_files, directory, state=None, **args):
    from megatron.fill.wings.llm import DraftTuning

    made = DraftTuning()
    directory.mkdir(exist_ok=True)
    made.context = TaskContext("tune", directory)
    large, requests, answers = map(str, given_files)
    small: dict[str, Any] = {
        "length": 24,
        "span": 2,
        "steps": 30,
        "batch_size": 4,
        "micro_batch_sizes": [2],
        "pieces": 3,
    }
    made.create(large, requests, answers, **small | {"micro_batch_sizes": [2], "optimizer_args": {"lr": 0.01}} | args)
    if state is not None:
        made.load_state_dict(state)
    made.configure(made.configurations()[0])
    made.init()
    return made


def step(made):
    """A step; one in which a draft is written goes on until it is there."""
    work = made.run_next_step()
    while made.idle:
        time.sleep(0.01)
        work += made.run_next_step()
    return work


def run(made):
    """The work until all drafts are trained."""
    work = 0.0
    while True:
        try:
            work += step(made)
        except StopIteration:
            made.stop()
            return work


def test_each_draft_learns_what_those_before_it_get_wrong(given_files, tmp_path):
    made = job(given_files, tmp_path / "job", drafts=2)
    windows, marked = made._windows, []
    learnt = []
    while made._draft == 0:
        made.run_next_step()
    marked.append(made._done.copy())
    work = 30.0 + run(made)
    assert work == made.context.total_work == 60
    tokenizer = load_tokenizer(given_files[0])
    examples = list(answered(str(given_files[1]), str(given_files[2]), tokenizer))
    assert len(examples) == 23
    # A span is marked if the draft goes on, from what is before it, with the very tokens of the large model.
    draft, own = load_language_model(tmp_path / "job/drafts/0")
    assert own.same_tokens(tokenizer)
    for window in range(len(windows)):
        for span in range(windows.count[window]):
            places = np.flatnonzero(windows.spans[window] == span)
            before = windows.inputs[window, : places[0] + 1].tolist()
            right = alone(draft, before, len(places))
            learnt.append((right == windows.labels[window, places].tolist()) == marked[0][window, span])
    assert all(learnt)
    spans = windows.is_span()
    assert 0 < (marked[0] & spans).sum() < spans.sum()
    assert not (marked[0] & ~made._right).any()
    assert made.context.result["left"] == round(1 - (made._right & spans).sum() / spans.sum(), 4)
    first, second = (load_language_model(tmp_path / f"job/drafts/{at}")[0].state_dict() for at in (0, 1))
    assert any(not (first[name] == second[name]).all() for name in first)


def test_interrupted_anywhere_it_ends_in_the_same_drafts(given_files, tmp_path):
    import torch

    whole = job(given_files, tmp_path / "whole", drafts=2, steps=12, split="whole")
    run(whole)
    source, state, work = random.Random(0), None, 0.0
    parts = 0
    while True:
        made = job(given_files, tmp_path / "parts", state, drafts=2, steps=12, split="whole")
        try:
            for _ in range(source.randint(3, 40)):
                work += step(made)
        except StopIteration:
            break
        kept = io.BytesIO()
        torch.save(made.state_dict(), kept)
        made.stop()
        parts += 1
        kept.seek(0)
        state = torch.load(kept)
    assert parts > 3
    assert work == whole.context.total_work
    for at in (0, 1):
        first, second = (load_language_model(tmp_path / f"{name}/drafts/{at}")[0] for name in ("whole", "parts"))
        assert all((a == b).all() for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_a_draft_of_another_family_is_tuned_further(given_files, tmp_path):
    small = folder(tmp_path / "small", model("gpt2", layers=1))
    made = job(given_files, tmp_path / "job", draft=str(small), steps=2)
    run(made)
    before = load_language_model(small)[0].state_dict()
    after = load_language_model(tmp_path / "job/drafts/0")[0].state_dict()
    assert before.keys() == after.keys()
    assert not all((before[name] == after[name]).all() for name in before)


def test_bytes_are_kept_with_a_draft(tmp_path):
    ByteTokenizer(257, 256).save(tmp_path)
    assert load_tokenizer(tmp_path).same_tokens(ByteTokenizer(257, 256))


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"drafts": 0}, "drafts is 0: expected"),
        ({"span": "4"}, "span is '4': expected"),
        ({"shape": {"width": 3}}, "shape has 'width': expected some of layers, hidden, heads"),
        ({"shape": {"hidden": 63}}, "expected hidden to be a multiple"),
        ({"shape": {"heads": 0}}, "shape.heads is 0"),
        ({"shape": {"layers": 1}, "draft": "x"}, "expected one of the two"),
    ],
)
def test_wrong_arguments(given_files, tmp_path, args, expected):
    with pytest.raises(ValueError, match=expected):
        job(given_files, tmp_path / "job", **args)


def test_files_that_are_none(given_files, tmp_path):
    large, requests, answers = given_files
    with pytest.raises(ConfigError, match=r"in\.jsonl, line 1: is not an answer of a batch"):
        job((large, requests, requests), tmp_path / "job")
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(ValueError, match="it has no answer to a request of"):
        job((large, requests, empty), tmp_path / "job")
    with pytest.raises(ConfigError, match="nothere"):
        job((large, requests, tmp_path / "nothere"), tmp_path / "job")
    with pytest.raises(TaskError, match="tokenizer of"):
        job((tmp_path, requests, answers), tmp_path / "job")
    with pytest.raises(TaskError, match="takes 16 tokens; expected length, 24"):
        job(given_files, tmp_path / "job", draft=str(folder(tmp_path / "short", model(context=16))))

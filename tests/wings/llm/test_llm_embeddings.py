"""Embeddings: what the model itself gives, in chunks and batches, among requests that generate."""

from __future__ import annotations

import base64
import json
from itertools import pairwise

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("greenlet")

from megatron.fill.errors import TaskError  # noqa: E402
from megatron.fill.wings.llm.pooling import read_pooling  # noqa: E402
from tests.support.small_models import CONTEXT, LETTERS, alone, folder, model  # noqa: E402
from tests.wings.llm.test_llm_batch import answers, job, request, run, write  # noqa: E402

URL = "/v1/embeddings"
TEXTS = ["a", "abc", LETTERS[:-1] * 2, "hello"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    where = tmp_path_factory.mktemp("models")
    return folder(where / "target", model()), folder(where / "draft", model(noise=0.02))


def expected(text, pooling):
    with torch.no_grad():
        ids = torch.tensor([[LETTERS.index(letter) for letter in text]])
        states = model().base_model(input_ids=ids).last_hidden_state[0].double()
    vector = (states[-1] if pooling == "last" else states.mean(0)).numpy()
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_they_are_those_of_the_model_alone_and_harm_no_other_request(models, tmp_path, pooling):
    lines = [request(0, URL, input=TEXTS), request(1, URL, input=TEXTS[1], encoding_format="base64")]
    lines += [request(2 + at, prompt="abcdef"[at:], max_tokens=9, temperature=0) for at in range(3)]
    lines += [request(9, URL, input=["abc", "a" * (CONTEXT + 1)]), request(10, URL, input=[1, 999])]
    lines += [request(11, URL, input=LETTERS[:32] * 6)]
    made = job(models, write(tmp_path / "in.jsonl", lines), tmp_path / "job", chunks=[16], pooling=pooling)
    work, finished = run(made)
    assert finished
    assert work == pytest.approx(len(lines))
    found = answers(tmp_path / "job")
    body = found["r0"]["body"]
    assert (body["object"], [one["index"] for one in body["data"]]) == ("list", [0, 1, 2, 3])
    assert body["usage"] == {"prompt_tokens": 87, "total_tokens": 87}
    for text, one in zip(TEXTS, body["data"], strict=True):
        assert np.allclose(one["embedding"], expected(text, pooling), atol=1e-5)
        assert np.linalg.norm(one["embedding"]) == pytest.approx(1, abs=1e-6)
    packed = found["r1"]["body"]["data"][0]["embedding"]
    # Of the same text, but in another batch, in which sums may be rounded otherwise.
    assert np.allclose(np.frombuffer(base64.b64decode(packed), "<f4"), body["data"][1]["embedding"], atol=1e-6)
    target = model()
    for at in range(3):
        tokens = alone(target, [LETTERS.index(letter) for letter in "abcdef"[at:]], 9)
        text = "".join(LETTERS[token] for token in tokens).partition(".")[0]
        assert found[f"r{2 + at}"]["body"]["choices"][0]["text"] == text
    assert [found[name]["status_code"] for name in ("r9", "r10")] == [400, 400]
    assert "expected at most the context, 192" in found["r9"]["body"]["error"]["message"]
    whole = found["r11"]["body"]["data"][0]["embedding"]
    assert np.allclose(whole, expected(LETTERS[:32] * 6, pooling), atol=1e-5)


def test_room_that_is_lost_and_a_state_that_is_loaded_change_no_vector(models, tmp_path):
    lines = [request(at, URL, input=[text[at:] or "a" for text in TEXTS]) for at in range(4)]
    requests = write(tmp_path / "in.jsonl", lines)
    run(job(models, requests, tmp_path / "undisturbed", chunks=[8], pooling="mean"))
    made = job(models, requests, tmp_path / "disturbed", chunks=[8], pooling="mean", batch_sizes=[4])
    for _ in range(3):
        _, finished = run(made, 9)
        assert not finished
        room = made._engine.room
        made._engine.abandon()
        made.next_node = 0
        room.narrow(1)
        room.narrow(4)
    made = job(models, requests, tmp_path / "disturbed", state=made.state_dict(), chunks=[8], pooling="mean")
    run(made)
    found, wanted = answers(tmp_path / "disturbed"), answers(tmp_path / "undisturbed")
    assert found.keys() == wanted.keys()
    for name, response in wanted.items():
        for one, other in zip(found[name]["body"]["data"], response["body"]["data"], strict=True):
            assert np.allclose(one["embedding"], other["embedding"], atol=1e-5)


def test_a_state_that_is_not_finite_is_an_error_of_its_own_request_only(models, tmp_path):
    broken = model()
    with torch.no_grad():
        broken.get_input_embeddings().weight[LETTERS.index("x")] = float("nan")
    lines = [request(0, URL, input=["abc", "ax"]), request(1, URL, input="abc"), request(2, URL, input="hello")]
    requests = write(tmp_path / "in.jsonl", lines)
    made = job(models, requests, tmp_path / "job", pooling="mean", batch_sizes=[1])
    made._running.runners[0].model.load_state_dict(broken.state_dict())
    run(made)
    found = answers(tmp_path / "job")
    assert [found[f"r{at}"]["status_code"] for at in range(3)] == [500, 200, 200]
    assert "hidden states are not finite" in found["r0"]["body"]["error"]["message"]
    assert np.allclose(found["r2"]["body"]["data"][0]["embedding"], expected("hello", "mean"), atol=1e-5)


def test_a_model_without_hidden_states_refuses_them_and_answers_all_else(models, tmp_path, monkeypatch):
    from transformers import LlamaForCausalLM, LlamaModel
    from transformers.modeling_outputs import CausalLMOutput

    plain = LlamaModel.forward

    class Other(dict):
        """Has what the model's own head needs, under another name."""

        def __init__(self, found):
            super().__init__(found)
            self.past_key_values, self.hidden_states, self.attentions = found.past_key_values, None, None
            self.found = found

    def forward(self, *given, **inputs):
        return Other(plain(self, *given, **inputs))

    def logits(self, **inputs):
        found = self.model(**inputs).found.last_hidden_state
        return CausalLMOutput(logits=self.lm_head(found))

    monkeypatch.setattr(LlamaModel, "forward", forward)
    monkeypatch.setattr(LlamaForCausalLM, "forward", logits)
    lines = [request(0, URL, input=["abc"]), request(1, prompt="abc", max_tokens=5, temperature=0)]
    made = job(models, write(tmp_path / "in.jsonl", lines), tmp_path / "job")
    assert run(made)[1]
    found = answers(tmp_path / "job")
    assert [found[name]["status_code"] for name in ("r0", "r1")] == [400, 200]
    assert "target gives no hidden states: expected another model" in found["r0"]["body"]["error"]["message"]


@pytest.mark.parametrize(
    ("said", "pooling"),
    [
        (None, "last"),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        ({"pooling_mode_mean_tokens": True, "word_embedding_dimension": 8}, "mean"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
def test_the_pooling_is_what_the_models_folder_says(tmp_path, said, pooling):
    if said is not None:
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(said))
    assert read_pooling("auto", tmp_path) == pooling
    for asked, other in pairwise(("last", "mean", "last")):
        assert (read_pooling(asked, tmp_path), read_pooling(other, tmp_path)) == (asked, other)


@pytest.mark.parametrize("said", ['{"pooling_mode_cls_token": true}', "{}", "[]", "no", '{"pooling_mode": ["a", "b"]}'])
def test_another_pooling_is_refused(tmp_path, said):
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(said)
    with pytest.raises(TaskError, match="1_Pooling"):
        read_pooling("auto", tmp_path)
    with pytest.raises(ValueError, match="pooling is 'cls': expected"):
        read_pooling("cls", tmp_path)

"""Answers that follow a JSON schema, also along the paths of a tree."""

from __future__ import annotations

import json
from itertools import count, product
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("greenlet")
pytest.importorskip("llguidance")

from megatron.fill.wings.llm.answering import Answering  # noqa: E402
from megatron.fill.wings.llm.answers import AnswerFile  # noqa: E402
from megatron.fill.wings.llm.attention import Context  # noqa: E402
from megatron.fill.wings.llm.branching import Branching  # noqa: E402
from megatron.fill.wings.llm.grammar import Grammars  # noqa: E402
from megatron.fill.wings.llm.requests import Request  # noqa: E402
from megatron.fill.wings.llm.sampling import Sampling, distribution  # noqa: E402
from megatron.fill.wings.llm.sequence import GeneratedSequence, Wanted  # noqa: E402
from megatron.fill.wings.llm.speccheck import EXACT, CheckedCase, check_step  # noqa: E402
from megatron.fill.wings.llm.tokenizers import ByteTokenizer, FolderTokenizer  # noqa: E402
from megatron.fill.wings.llm.verify import matching, multi_step, traversal  # noqa: E402

END = 256
BYTES = ByteTokenizer(257, END)
SCHEMA = {"enum": ["ab", "aa", "b"]}
TEXTS = ['"ab"', '"aa"', '"b"']


def following(text):
    """Tokens that may come after a text, by the texts that the schema allows."""
    if text in TEXTS:
        return {END}
    return {ord(one[len(text)]) for one in TEXTS if one.startswith(text)}


def test_what_may_come_next_is_what_some_text_of_the_schema_has():
    for done, path in product(range(4), range(3)):
        for text in TEXTS:
            grammar = Grammars(BYTES).of(SCHEMA)
            before, after = text[:done], text[done : done + path]
            found = grammar.allowed(list(before.encode()), tuple(after.encode()))
            assert set(np.flatnonzero(found)) == following(before + after)


def test_what_is_impossible_or_after_the_end_is_never_asked_for_but_harms_nothing():
    grammar = Grammars(BYTES).of(SCHEMA)
    assert set(np.flatnonzero(grammar.allowed([], (1, 2)))) == {END}
    assert set(np.flatnonzero(grammar.allowed([], (*b'"b"', END)))) == {END}
    assert set(np.flatnonzero(grammar.allowed([], ()))) == {ord('"')}
    assert set(np.flatnonzero(grammar.allowed(list(b'"b"'), (END, END)))) == {END}
    assert grammar.error is None


def test_a_token_that_the_grammar_refuses_is_an_error_and_the_text_ends():
    grammar = Grammars(BYTES).of(SCHEMA)
    assert set(np.flatnonzero(grammar.allowed([1], ()))) == {END}
    assert grammar.error


def test_a_choice_that_could_not_follow_the_schema_fails_its_request_also_after_a_restart(tmp_path):
    request = Request(1, "one", False, ("ab",), n=2, schema=SCHEMA)

    def answering():
        file, context = AnswerFile(tmp_path / "answers.jsonl"), Context(100)
        grammars = Grammars(BYTES)
        return Answering([request], file, BYTES, context, "model", 0, lambda one: True, 257, grammars, "last", False)

    before = answering()
    failing = before.following()
    failing.take([1], [], [END], BYTES.decode)
    failing.grammar.allowed(failing.generated, ())
    failing.take([END], [], [END], BYTES.decode)
    before.ended(failing)
    after = answering()
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    other = after.following()
    other.take([*b'"b"', END], [], [END], BYTES.decode)
    after.ended(other)
    assert after.following() is None
    (line,) = map(json.loads, (tmp_path / "answers.jsonl").read_text().splitlines())
    assert line["response"]["status_code"] == 500
    assert line["response"]["body"]["error"]["message"].startswith("response_format could not be followed: ")


@pytest.mark.parametrize(
    "schema", [{"type": "strange"}, {"pattern": "(", "type": "string"}, {"$ref": "#/none"}], ids=str
)
def test_a_schema_that_is_none_is_refused_in_one_line(schema):
    with pytest.raises(ValueError, match=r"response_format has a schema that is not supported: .+") as error:
        Grammars(BYTES).of(schema)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("end", "why"), [(None, "it has no end of text"), ("b", "can't determine decoder type")])
def test_a_tokenizer_without_grammars_refuses_the_request_that_wants_one_and_no_other(tmp_path, end, why):
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    made.decoder = decoders.Fuse()
    tokenizer = FolderTokenizer(PreTrainedTokenizerFast(tokenizer_object=made, eos_token=end))
    lines = [Request(1, "one", False, ("a",), schema=SCHEMA), Request(2, "two", False, ("a",))]
    file, grammars = AnswerFile(tmp_path / "answers.jsonl"), Grammars(tokenizer)
    answers = Answering(lines, file, tokenizer, Context(9), "model", 0, lambda one: True, 2, grammars, "last", False)
    assert [one and one.name for one in (answers.following(), answers.following())] == [(2, 0), None]
    (line,) = map(json.loads, (tmp_path / "answers.jsonl").read_text().splitlines())
    assert line["response"]["status_code"] == 400
    assert why in line["response"]["body"]["error"]["message"]


def test_tokens_of_several_bytes_and_several_ends():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {letter: at for at, letter in enumerate([*letters, '"a', 'b"', "<end>", "<stop>"])}
    made = Tokenizer(models.BPE(words, [('"', "a"), ("b", '"')]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", additional_special_tokens=["<stop>"])
    tokenizer = FolderTokenizer(fast, frozenset([words["<stop>"]]))
    grammar = Grammars(tokenizer).of(SCHEMA)
    assert set(np.flatnonzero(grammar.allowed([], ()))) == {words['"'], words['"a']}
    assert set(np.flatnonzero(grammar.allowed([], (words['"a'],)))) == {words["a"], words["b"], words['b"']}
    ends = {words["<end>"], words["<stop>"]}
    assert set(np.flatnonzero(grammar.allowed([words['"a']], (words['b"'],)))) == ends


def logits_of(path, seed):
    random = np.random.default_rng((seed, *path))
    found = np.full(257, -20.0)
    possible = [ord('"'), ord("a"), ord("b"), END]
    found[possible] = random.normal(size=4)
    return torch.tensor(found, dtype=torch.float32)


SMALL = [ord('"'), ord("a"), ord("b"), END]


@pytest.mark.parametrize("rule", [matching, multi_step, traversal])
def test_tokens_of_a_tree_are_distributed_as_the_grammar_leaves_them(rule):
    """Every outcome is listed; tokens are numbered as in ``SMALL``, others are impossible."""
    sampling, generated = Sampling(1.0), list(b'"')

    def target(path):
        tokens = tuple(SMALL[at] for at in path)
        text = bytes([*generated, *(token for token in tokens if token != END)]).decode()
        if END in tokens or not any(one.startswith(text) for one in TEXTS):
            return np.array([0.0, 0.0, 0.0, 1.0])
        row = logits_of(tokens, 1).numpy().astype(np.float64)
        row[[token for token in range(257) if token not in following(text)]] = -np.inf
        return distribution(row, sampling)[SMALL]

    def step(chance):
        sequence = GeneratedSequence(Wanted((0,), 9, sampling), generated=list(generated), grammar=made.of(SCHEMA))
        sequence.cached = [1, 1]
        one = Branching(sequence, (2, 1), {1: [[0]]}, chance)
        for level in range(2):
            nodes = one.levels[1][level]
            one.grow(1, level, torch.stack([logits_of(one.tree.path(node), 2) for node in nodes]))
        logits = torch.stack([logits_of(one.tree.path(node), 1) for node in range(len(one.tree.tokens))])
        return [
            SMALL.index(token) for token in one.verified(rule, logits, logits.argmax(-1).tolist(), [True] * len(logits))
        ]

    made = Grammars(BYTES)

    assert check_step(step, CheckedCase("grammar", 4, target, (), (2, 1))).distance < EXACT


@pytest.fixture(scope="module")
def bytes_model(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    where = tmp_path_factory.mktemp("models")
    torch.manual_seed(1)
    shape: dict[str, Any] = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(**shape, num_attention_heads=4, max_position_embeddings=128, initializer_range=0.3)
    config.eos_token_id = END
    config.bos_token_id = config.pad_token_id = None
    made = LlamaForCausalLM(config).eval()
    for name in ("target", "draft"):
        made.save_pretrained(where / name)
        BYTES.save(where / name)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
    return where / "target", where / "draft"


@pytest.mark.parametrize("tree", [[1, 1, 1], [2, 1]], ids=str)
def test_answers_of_a_job_follow_their_schemas(bytes_model, tmp_path, tree):
    from tests.wings.llm.test_llm_batch import answers, job, request, run, write

    number = count()
    fields = {"kind": {"enum": ["x", "yy"]}, "sure": {"type": "boolean"}}
    schema = {"type": "object", "properties": fields, "required": ["kind", "sure"], "additionalProperties": False}
    asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    lines = [
        request(next(number), prompt="ab", max_tokens=100, temperature=temperature, response_format=form, n=2)
        for temperature in (0, 1)
        for form in (asked, {"type": "json_schema", "json_schema": {"schema": SCHEMA}})
    ]
    wrong = {"type": "json_schema", "json_schema": {"schema": {"type": "strange"}}}
    lines.append(request(next(number), prompt="ab", response_format=wrong))
    lines.append(request(next(number), prompt="ab", max_tokens=5, response_format={"type": "json_object"}))
    run(job(bytes_model, write(tmp_path / "in.jsonl", lines), tmp_path / "job", tree=tree))
    found = answers(tmp_path / "job")
    for at in range(4):
        for choice in found[f"r{at}"]["body"]["choices"]:
            if choice["finish_reason"] == "stop":
                value = json.loads(choice["text"])
                assert value in SCHEMA["enum"] if at % 2 else set(value) == {"kind", "sure"}
    stopped = [one["finish_reason"] for at in (1, 3) for one in found[f"r{at}"]["body"]["choices"]]
    assert stopped == ["stop"] * 4
    assert found["r4"]["status_code"] == 400
    assert "strange" in found["r4"]["body"]["error"]["message"]
    assert found["r5"]["body"]["choices"][0]["text"].lstrip()[:1] == "{"

"""``BatchJob``: a file of requests, each answered once, whatever happens meanwhile."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from megatron.fill.errors import ConfigError, TaskError
from megatron.fill.profiles import Configuration
from megatron.fill.sidetask.base import TaskContext
from megatron.fill.wings.llm import BatchJob
from tests.support.small_models import CONTEXT, LETTERS, alone, folder, model

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("greenlet")

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}{% if add_generation_prompt %}a{% endif %}"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    where = tmp_path_factory.mktemp("models")
    return folder(where / "target", model(), TEMPLATE), folder(where / "draft", model(noise=0.02))


def request(number, url="/v1/completions", **body):
    return {"custom_id": f"r{number}", "method": "POST", "url": url, "body": body}


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def job(models, requests, directory, memory_bytes=None, measuring=False, state=None, **args):
    made = BatchJob()
    directory.mkdir(exist_ok=True)
    made.context = TaskContext("answers", directory, memory_bytes=memory_bytes, measuring=measuring)
    target, draft = models
    more: dict[str, Any] = {"draft": [str(draft)], "tree": [1, 1, 2]} | args
    made.create(str(target), str(requests), **more)
    if state is not None:
        made.load_state_dict(json.loads(json.dumps(state)))
    made.configure(made.configurations()[0])
    made.init()
    return made


def run(made, steps=100_000):
    """The work of so many steps, or of all; whether it is finished."""
    work = 0.0
    for _ in range(steps):
        try:
            work += made.run_next_step()
        except StopIteration:
            made.stop()
            return work, True
    return work, False


def answers(directory):
    lines = [json.loads(line) for line in (directory / "answers.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines)
    return {line["custom_id"]: line["response"] for line in lines}


def some_requests(count=12):
    source = random.Random(1)
    return [
        request(
            number,
            prompt="".join(source.choices(LETTERS[:-1], k=source.randint(1, 30))),
            max_tokens=source.randint(1, 20),
            temperature=number % 2,
            frequency_penalty=number % 5 / 4,
            n=1 + number % 3,
        )
        for number in range(count)
    ]


def test_greedy_answers_are_those_of_the_model_alone(models, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(models[0], local_files_only=True).eval()
    lines = [request(at, prompt=LETTERS[at : at + 9], max_tokens=12, temperature=0) for at in range(8)]
    work, finished = run(job(models, write(tmp_path / "in.jsonl", lines), tmp_path / "job"))
    assert finished
    assert work == pytest.approx(8)
    found = answers(tmp_path / "job")
    for at in range(8):
        tokens = alone(target, list(range(at, at + 9)), 12)
        body = found[f"r{at}"]["body"]
        ended = len(LETTERS) - 1 in tokens
        tokens = tokens[: tokens.index(len(LETTERS) - 1) + 1] if ended else tokens
        assert body["choices"][0]["text"] == "".join(LETTERS[token] for token in tokens).rstrip(".")
        assert body["choices"][0]["finish_reason"] == ("stop" if ended else "length")
        assert body["usage"] == {
            "prompt_tokens": 9,
            "completion_tokens": len(tokens),
            "total_tokens": 9 + len(tokens),
        }
    assert torch.is_grad_enabled()


def test_a_chat_goes_through_the_models_template(models, tmp_path):
    messages = [{"role": "user", "content": "hello"}]
    lines = [
        request(0, "/v1/chat/completions", messages=messages, max_tokens=6, temperature=0),
        request(1, prompt="uhelloa", max_tokens=6, temperature=0),
    ]
    run(job(models, write(tmp_path / "in.jsonl", lines), tmp_path / "job"))
    chat, plain = (answers(tmp_path / "job")[f"r{at}"]["body"] for at in range(2))
    assert chat["choices"][0]["message"]["content"] == plain["choices"][0]["text"]
    assert chat["object"] == "chat.completion"


def test_a_template_is_given_tools_calls_and_arguments_of_its_own(models, tmp_path):
    template = (
        "{% for m in messages %}{{ m.role[0] }}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments.at }}{% endfor %}{% endfor %}"
        "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{{ mood }}{{ reasoning_effort }}"
    )
    where = folder(tmp_path / "model", model(), template)
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "tree"},
    ]
    more = {"chat_template_kwargs": {"mood": "glad"}, "reasoning_effort": "low", "max_tokens": 6, "temperature": 0}
    lines = [
        request(0, "/v1/chat/completions", messages=messages, tools=tools, **more),
        request(1, prompt="uhialookxttreelookgladlow", max_tokens=6, temperature=0),
    ]
    run(job((where, models[1]), write(tmp_path / "in.jsonl", lines), tmp_path / "job"))
    chat, plain = (answers(tmp_path / "job")[f"r{at}"]["body"] for at in range(2))
    assert chat["choices"][0]["message"]["content"] == plain["choices"][0]["text"]


def test_several_prompts_are_answered_in_one_line(models, tmp_path):
    lines = [request(0, prompt=["abc", [5, 6], "ab"], n=2, max_tokens=4, temperature=0)]
    lines += [request(at, prompt=prompt, max_tokens=4, temperature=0) for at, prompt in ((1, "abc"), (2, [5, 6]))]
    work, _ = run(job(models, write(tmp_path / "in.jsonl", lines), tmp_path / "job"))
    assert work == pytest.approx(3)
    found = answers(tmp_path / "job")
    together = found["r0"]["body"]
    assert [one["index"] for one in together["choices"]] == list(range(6))
    assert together["usage"]["prompt_tokens"] == 7
    for at, name in ((0, "r1"), (2, "r2")):
        alone_too = found[name]["body"]["choices"][0]["text"]
        assert [one["text"] for one in together["choices"][at : at + 2]] == [alone_too] * 2


def test_a_wrong_request_gets_its_own_error_and_harms_no_other(models, tmp_path):
    lines = [
        request(0, prompt="abc", max_tokens=2),
        request(1, prompt="abc", max_tokens=0),
        request(2, prompt="a" * CONTEXT, max_tokens=2),
        request(3, prompt=[1, 2, 999], max_tokens=2),
        request(4, prompt="abc", max_tokens=2),
        {"method": "POST"},
        request(6, prompt="abc", logit_bias={"999": 1}),
        request(7, prompt=["abc", "a" * CONTEXT]),
    ]
    work, finished = run(job(models, write(tmp_path / "in.jsonl", lines), tmp_path / "job"))
    assert finished
    assert work == pytest.approx(8)
    found = answers(tmp_path / "job")
    codes = {name: answer["status_code"] for name, answer in found.items()}
    assert codes == {"r0": 200, "r1": 400, "r2": 400, "r3": 400, "r4": 200, None: 400, "r6": 400, "r7": 400}
    assert "expected fewer than the context" in found["r2"]["body"]["error"]["message"]
    assert "999" in found["r3"]["body"]["error"]["message"]
    assert "logit_bias has token 999" in found["r6"]["body"]["error"]["message"]


def test_without_a_template_a_chat_is_an_error_for_that_request(models, tmp_path):
    lines = [request(0, "/v1/chat/completions", messages=[{"role": "user", "content": "x"}])]
    run(job((models[1], models[1]), write(tmp_path / "in.jsonl", lines), tmp_path / "job"))
    assert "no chat template" in answers(tmp_path / "job")["r0"]["body"]["error"]["message"]


@pytest.mark.parametrize("saved", [True, False])
def test_killed_at_any_step_it_answers_each_request_once_and_with_the_same_tokens(models, tmp_path, saved):
    requests = write(tmp_path / "in.jsonl", some_requests())
    run(job(models, requests, tmp_path / "undisturbed"))
    source, state, finished, starts = random.Random(2), None, False, 0
    while not finished:
        made = job(models, requests, tmp_path / "disturbed", state=state)
        _, finished = run(made, source.randint(20, 120))
        if saved and not finished:
            state = made.state_dict()
            run(made, source.randint(0, 40))  # what is done after it was saved is done again
        starts += 1
        with (tmp_path / "disturbed" / "answers.jsonl").open("ab") as file:
            file.write(b'{"id": "batch_req_torn')
    assert starts > 3
    cut_the_torn_line(tmp_path / "disturbed")
    assert answers(tmp_path / "disturbed") == answers(tmp_path / "undisturbed")


def cut_the_torn_line(directory):
    """Cut off the torn line of the last start."""
    path = directory / "answers.jsonl"
    data = path.read_bytes()
    path.write_bytes(data[: data.rindex(b"\n") + 1])


def test_what_was_saved_is_saved_again_before_it_is_reached_again(models, tmp_path):
    lines = [request(at, prompt="abcdef"[at], max_tokens=30, temperature=1, n=3) for at in range(6)]
    requests = write(tmp_path / "in.jsonl", lines)
    made = job(models, requests, tmp_path / "job", batch_sizes=[8])
    before, _ = run(made, 60)
    state = made.state_dict()
    assert len(state["sequences"]) > 2
    one = job(models, requests, tmp_path / "job", batch_sizes=[1], state=state)
    works = [one.run_next_step() for _ in range(15)]
    assert min(works) >= 0
    found = {(line, number): kept["generated"] for line, number, kept in one.state_dict()["sequences"]}
    for line, number, kept in state["sequences"]:
        generated = found.get((line, number), kept["generated"])
        assert generated[: len(kept["generated"])] == kept["generated"]
    assert len(found) >= len(state["sequences"]) - 1  # one may have ended
    after, finished = run(one)
    assert finished
    assert before + sum(works) + after == pytest.approx(6)


def test_what_was_done_before_counts_once(models, tmp_path):
    requests = write(tmp_path / "in.jsonl", some_requests())
    made = job(models, requests, tmp_path / "job")
    before, finished = run(made, 60)
    assert not finished
    resumed = job(models, requests, tmp_path / "job", state=made.state_dict())
    assert resumed.generated == made.generated > 0  # the answers before count in its result, so do their tokens
    after, finished = run(resumed)
    assert finished
    assert before > 0
    assert before + after == pytest.approx(12)


def test_no_step_after_a_checkpoint_takes_work_back(models, tmp_path):
    lines = [request(at, prompt=LETTERS[:9], max_tokens=10) for at in range(3)]
    begun: dict[str, Any] = {"notes": [], "finish": None, "text": "", "pooled": None}
    # 0.1, 0.2 and 0.3 of a request: one after the other they are more than Python's sum of them
    state = {"sequences": [[at + 1, 0, {"generated": [0] * (at + 1)} | begun] for at in range(3)]}
    made = job(models, write(tmp_path / "in.jsonl", lines), tmp_path / "job", state=state, chunks=[1])
    work = [made.run_next_step()]
    while made.next_node:
        work.append(made.run_next_step())
    assert min(work) == 0.0


def test_memory_that_the_training_needs_is_given_back_and_nothing_changes(models, tmp_path):
    requests = write(tmp_path / "in.jsonl", some_requests())
    run(job(models, requests, tmp_path / "undisturbed"))
    made = job(models, requests, tmp_path / "shrunk", kv_bytes="8MiB")
    run(made, 50)
    room = made._engine.room
    assert len(room.active) > 2
    from megatron.fill.wings.llm.fitting import held_bytes

    caches = [runner.cache for runner in made._engine.runners]
    held = sum(cache.held_bytes for cache in caches)
    one = room.bytes_for_one(CONTEXT)
    assert made.shrink(held_bytes("cpu") - held + 2 * one)
    assert sum(cache.held_bytes for cache in caches) <= 2 * one
    assert made.next_node == 0
    assert not made.shrink(1 << 20)
    run(made)
    assert answers(tmp_path / "shrunk") == answers(tmp_path / "undisturbed")


def test_too_little_memory_is_said_before_anything_is_answered(models, tmp_path):
    requests = write(tmp_path / "in.jsonl", some_requests())
    with pytest.raises(TaskError, match="left for keys and values; expected"):
        job(models, requests, tmp_path / "job", memory_bytes=64 << 20)


def test_every_node_is_measured_in_every_configuration(models, tmp_path):
    requests = write(tmp_path / "in.jsonl", some_requests())
    made = job(models, requests, tmp_path / "job", measuring=True, tree="auto", batch_sizes=[4, 1], chunks=[16, 8])
    assert made.configurations() == [Configuration(b, chunk=c) for b in (4, 1) for c in (16, 8)]
    for configuration in made.configurations():
        made.configure(configuration)
        for _ in range(3):
            visited: list[int] = []
            while not visited or made.next_node:
                visited.append(made.next_node)
                made.run_next_step()
            assert visited == list(range(len(made.node_names())))
    assert not (tmp_path / "job" / "answers.jsonl").read_bytes()


def test_a_configuration_may_change_between_rounds(models, tmp_path):
    requests = write(tmp_path / "in.jsonl", some_requests())
    run(job(models, requests, tmp_path / "undisturbed"))
    made = job(models, requests, tmp_path / "changed")
    finished, source = False, random.Random(4)
    while not finished:
        _, finished = run(made, source.randint(1, 60))
        made.configure(source.choice(made.configurations()))
    assert answers(tmp_path / "changed") == answers(tmp_path / "undisturbed")


def test_a_model_whose_files_lack_a_tensor_is_refused(models, tmp_path):
    from safetensors.torch import load_file, save_file

    made = folder(tmp_path / "lacking", model())
    weights = load_file(made / "model.safetensors")
    taken = weights.pop("model.layers.1.self_attn.q_proj.weight")
    save_file(weights | {"model.layers.1.self_attn.q.weight": taken}, made / "model.safetensors", {"format": "pt"})
    requests = write(tmp_path / "in.jsonl", some_requests(1))
    with pytest.raises(TaskError, match=r"1 tensors .* model.layers.1.self_attn.q_proj.weight; the files have .*q.wei"):
        job((made, models[1]), requests, tmp_path / "job")
    save_file(
        weights | {"model.layers.1.self_attn.q_proj.weight": taken[1:]}, made / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(
        TaskError, match=r"1 tensors .* have another shape: model.layers.1.self_attn.q_proj.weight; exp"
    ):
        job((made, models[1]), requests, tmp_path / "job")


def test_a_request_beyond_where_rope_changes_is_refused_and_says_so(models, tmp_path):
    from megatron.fill.wings.llm import attention

    lines = [request(at, prompt="abc" * 8, max_tokens=count, temperature=0) for at, count in enumerate([8, 9])]
    requests = write(tmp_path / "in.jsonl", lines)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "context_of", lambda model: attention.Context(32, "there rope changes"))
        run(job(models, requests, tmp_path / "job"))
    found = answers(tmp_path / "job")
    assert [found[f"r{at}"]["status_code"] for at in range(2)] == [200, 400]
    assert "at most 32 in all: there rope changes" in found["r1"]["body"]["error"]["message"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"tree": []}, "tree is"),
        ({"tree": "wide"}, "expected auto"),
        ({"tree": [1, 0]}, "tree is"),
        ({"rule": "greedy"}, "expected one of matching"),
        ({"batch_sizes": [0]}, "batch_sizes is 0"),
        ({"chunks": []}, "chunks is []"),
        ({"dtype": "int8"}, "dtype is"),
        ({"kv_bytes": "many"}, "many"),
        ({"pieces": 0}, "pieces is 0"),
        ({"draft": "/models/small"}, "draft is '/models/small': expected a list of texts"),
    ],
)
def test_wrong_arguments_are_refused(models, tmp_path, args, message):
    requests = write(tmp_path / "in.jsonl", some_requests(1))
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        job(models, requests, tmp_path / "job", **args)


def test_what_is_no_file_of_requests_or_no_model_is_refused(models, tmp_path):
    with pytest.raises(ConfigError, match="expected a batch file"):
        job(models, tmp_path / "none.jsonl", tmp_path / "job")
    requests = write(tmp_path / "in.jsonl", some_requests(1))
    with pytest.raises(TaskError, match="expected a folder as"):
        job((tmp_path, models[1]), requests, tmp_path / "job")


def test_a_stop_may_be_a_special_token(models, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    made = AutoModelForCausalLM.from_pretrained(models[0], local_files_only=True).eval()
    tokens = alone(made, [5, 6, 7], 12)
    at = next(at for at, token in enumerate(tokens) if at > 1 and token not in tokens[:at])
    where = folder(tmp_path / "model", made, TEMPLATE)
    tokenizer = AutoTokenizer.from_pretrained(where)
    tokenizer.add_special_tokens({"additional_special_tokens": [LETTERS[tokens[at]]]})
    tokenizer.save_pretrained(where)
    body = {"prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0, "logprobs": 2}
    after = LETTERS[tokens[at]] + next(LETTERS[token] for token in tokens[at:] if token != tokens[at])
    lines = [request(0, **body, stop=[LETTERS[tokens[at]]]), request(1, **body), request(2, **body, stop=[after])]
    run(job((where, models[1]), write(tmp_path / "in.jsonl", lines), tmp_path / "job", draft=[]))
    mixed = answers(tmp_path / "job")["r2"]["body"]["choices"][0]
    assert mixed["finish_reason"] == "stop"
    assert mixed["text"] == "".join(LETTERS[token] for token in tokens[:at])
    stopped, through = (answers(tmp_path / "job")[f"r{at}"]["body"]["choices"][0] for at in range(2))
    before = [LETTERS[token] for token in tokens[:at]]
    assert (stopped["text"], stopped["finish_reason"]) == ("".join(before), "stop")
    assert stopped["logprobs"]["tokens"] == before
    assert stopped["logprobs"]["text_offset"] == list(range(at))
    assert through["text"].startswith(stopped["text"])
    assert LETTERS[tokens[at]] not in through["text"]


def test_the_largest_and_the_smallest_configuration_are_measured_by_default(models, tmp_path):
    requests = write(tmp_path / "in.jsonl", some_requests(1))
    assert job(models, requests, tmp_path / "a").configurations() == [
        Configuration(8, chunk=128),
        Configuration(1, chunk=32),
    ]
    given = job(models, requests, tmp_path / "b", batch_sizes=[4, 2], chunks=[16]).configurations()
    assert given == [Configuration(4, chunk=16), Configuration(2, chunk=16)]

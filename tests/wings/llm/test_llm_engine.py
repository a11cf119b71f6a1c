"""The engine: what it generates is what the model alone generates, however rounds are cut, trees grown, room lost."""

from __future__ import annotations

import random
from itertools import count

import pytest

from tests.support.small_models import CONTEXT, FAMILIES, VOCABULARY, alone, model
from tests.wings.llm.llm_plainly import plainly_adjusted

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("greenlet")

from megatron.fill.wings.llm import verify  # noqa: E402
from megatron.fill.wings.llm.engine import Engine  # noqa: E402
from megatron.fill.wings.llm.passes import ModelRunner, RowInput  # noqa: E402
from megatron.fill.wings.llm.sampling import Sampling  # noqa: E402
from megatron.fill.wings.llm.sequence import GeneratedSequence, Wanted  # noqa: E402

SHAPES = [(1,), (1, 1, 1, 1), (3, 1), (2, 2, 1), (1, 1, 3, 1, 1, 1, 1, 1)]


def spell(tokens):
    return "".join(chr(ord("A") + token) for token in tokens)


def engine(models, shapes=((),), batch=4, chunk=16, pieces=2, rule=verify.traversal, ends=frozenset()):
    runners = [ModelRunner(one, CONTEXT, pieces) for one in models]
    return Engine(runners, spell, ends, rule, shapes, batch, chunk, count().__next__)


def some_prompts(number, seed=0, longest=40):
    source = random.Random(seed)
    return [[source.randrange(VOCABULARY) for _ in range(source.randint(1, longest))] for _ in range(number)]


def generate(made, wanted, disturb=None):
    """All sequences, in the order in which they are wanted; ``disturb(step, node)`` is called before every node."""
    made.room.waiting.extend(GeneratedSequence(one, name) for name, one in enumerate(wanted))
    node = 0
    for step in range(100_000):
        if made.idle:
            break
        if disturb is not None and disturb(step, node):
            node = 0
        node = made.run(node)
    assert made.idle
    return sorted(made.finished, key=lambda sequence: sequence.name)


def greedily(made, prompts, most, **kwargs):
    wanted = [Wanted(tuple(prompt), count) for prompt, count in zip(prompts, most, strict=True)]
    return [sequence.generated for sequence in generate(made, wanted, **kwargs)]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_generates_what_transformers_does(family):
    target, draft = model(family), model(family, noise=0.02)
    prompts, most = some_prompts(6), [1, 2, 9, 17, 30, 5]
    expected = [alone(target, prompt, count) for prompt, count in zip(prompts, most, strict=True)]
    assert greedily(engine([target]), prompts, most) == expected
    made = engine([target, draft], [(1, 1, 3, 1)])
    assert greedily(made, prompts, most) == expected
    assert made.tokens == sum(most)
    assert made.tokens > 1.3 * made.steps  # else the draft was of no use, and little was shown


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_no_tree_and_no_batch_changes_a_token(batch):
    target, drafts = model(), [model(noise=0.03), model(seed=5, layers=1)]
    prompts, most = some_prompts(8, seed=1), [12, 3, 8, 1, 15, 5, 2, 9]
    expected = [alone(target, prompt, count) for prompt, count in zip(prompts, most, strict=True)]
    for shape in SHAPES:
        assert greedily(engine([target, *drafts], [shape], batch, chunk=8), prompts, most) == expected, shape


def test_every_node_of_a_tree_sees_its_own_sequence_only():
    target = model("qwen2")
    runner = ModelRunner(target, CONTEXT, 1)
    runner.cache.resize(5, {})
    committed, chains = [5, 6, 7, 8], [[9], [9, 10], [11], [11, 12], [11, 12, 13], [9, 14]]
    runner.begin([RowInput.following([5, 2], committed[:-1], 0)], logits=False)
    assert runner.passes.run()
    import numpy as np

    visible = np.ones((7, 10), dtype=bool)
    paths = [[], *chains]
    visible[:, 3:] = [[paths[b] == paths[a][: len(paths[b])] for b in range(7)] for a in range(7)]
    tokens = [committed[-1], *(chain[-1] for chain in chains)]
    runner.begin([RowInput([5, 2], tokens, range(3, 10), [3, *(3 + len(chain) for chain in chains)], visible)])
    assert runner.passes.run()
    for node, path in enumerate(paths):
        with torch.no_grad():
            expected = target(torch.tensor([committed + path])).logits[0, -1]
        assert (runner.passes.result[0, node] - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_round_that_is_begun_again_changes_nothing(temperature):
    target, draft = model(), model(noise=0.03)
    wanted = [
        Wanted(tuple(prompt), 12, Sampling(temperature, 0.9), seed=(7, at))
        for at, prompt in enumerate(some_prompts(5, seed=2))
    ]
    expected = [one.generated for one in generate(engine([target, draft], [(2, 1)]), wanted)]
    made = engine([target, draft], [(2, 1)], pieces=3)
    source = random.Random(3)

    def disturb(step, node):
        if source.random() < 0.1:
            made.abandon()
            return True
        return False

    assert [one.generated for one in generate(made, wanted, disturb)] == expected


def test_what_is_drawn_depends_on_the_seed_alone():
    target, draft = model(), model(noise=0.03)
    wanted = [Wanted(tuple(some_prompts(1)[0]), 12, Sampling(1.0), seed=(seed,)) for seed in (1, 2, 1)]
    first, second, again = (one.generated for one in generate(engine([target, draft], [(2, 1)]), wanted))
    assert first == again
    assert first != second


PENALISED = Sampling(0.0, 1.0, 0, 0.0, 0.7, 0.9, 1.4, ((3, 2.0), (7, -100.0)))


@pytest.mark.parametrize("shape", [(), (1, 1, 1, 1), (2, 2, 1)], ids=str)
def test_greedy_tokens_with_penalties_are_those_of_the_definition(shape):
    target, draft = model(), model(noise=0.02)
    prompts = some_prompts(4, seed=11)
    found = generate(
        engine([target, draft], [shape], batch=3), [Wanted(tuple(prompt), 24, PENALISED) for prompt in prompts]
    )
    for prompt, sequence in zip(prompts, found, strict=True):
        generated: list[int] = []
        for _ in range(24):
            with torch.no_grad():
                logits = target(torch.tensor([prompt + generated])).logits[0, -1]
            scores = plainly_adjusted(logits, PENALISED, prompt, generated)
            generated.append(max(range(VOCABULARY), key=scores.__getitem__))
        assert sequence.generated == generated
    assert len({tuple(one.generated) for one in found}) == 4


def test_keys_and_values_never_exceed_their_limit():
    target, draft = model(), model(noise=0.03, layers=1)
    prompts, most = some_prompts(10, seed=4, longest=60), [40, 3, 20, 8, 60, 9, 30, 2, 14, 50]
    expected = [alone(target, prompt, count) for prompt, count in zip(prompts, most, strict=True)]
    made = engine([target, draft], [(1, 1)], batch=8)
    first = 4 * made.room.bytes_for_one(128)
    limits = {50: first // 2, 90: first // 4, 160: first}
    made.room.limit(first)
    over = []

    def disturb(step, node):
        if step in limits:
            made.abandon()
            made.room.limit(limits[step])
        now = limits[max(at for at in limits if at <= step)] if step >= 50 else first
        over.append(sum(runner.cache.held_bytes for runner in made.runners) > now)
        return step in limits

    assert greedily(made, prompts, most, disturb=disturb) == expected
    assert not any(over)
    assert 0 < made.room.peak_bytes <= first


def test_a_sequence_ends_at_a_stop_in_the_middle_of_a_path():
    target, draft = model(), model()  # the draft is always right
    prompt = some_prompts(1, seed=6)[0]
    text = spell(alone(target, prompt, 24))
    stop = text[5:7]
    (found,) = generate(engine([target, draft], [(1,) * 8]), [Wanted(tuple(prompt), 24, stop=(stop, "never there"))])
    assert found.finish == "stop"
    assert found.text == text[: text.index(stop)]
    assert spell(found.generated) == found.text + stop


def test_a_sequence_ends_at_the_models_own_end():
    target, draft = model(), model()
    prompt = some_prompts(1, seed=6)[0]
    tokens = alone(target, prompt, 24)
    end = tokens[9]
    (found,) = generate(engine([target, draft], [(1,) * 8], ends=frozenset([end])), [Wanted(tuple(prompt), 24)])
    assert found.finish == "stop"
    assert found.generated == tokens[: tokens.index(end) + 1]
    assert found.text == spell(found.generated[:-1])


def test_notes_hold_the_logarithms_of_the_model():
    target, draft = model(), model(noise=0.02)
    prompt = some_prompts(1, seed=8)[0]
    (found,) = generate(engine([target, draft], [(2, 1, 1)]), [Wanted(tuple(prompt), 10, alternatives=3)])
    with torch.no_grad():
        logits = target(torch.tensor([prompt + found.generated])).logits[0, len(prompt) - 1 : -1]
    expected = logits.double().log_softmax(-1)
    assert [note.token for note in found.notes] == found.generated
    for note, row in zip(found.notes, expected, strict=True):
        assert note.logarithm == pytest.approx(row[note.token].item(), abs=1e-5)
        assert [token for token, _ in note.best] == row.topk(3).indices.tolist()


def test_a_draft_of_a_shorter_context_leaves_the_rest_to_the_model():
    target, draft = model(), model(noise=0.02)
    made = engine([target, draft], [(1, 1, 1)])
    made.runners[1].context = 24
    prompt = some_prompts(1, seed=9, longest=4)[0]
    (found,) = generate(made, [Wanted(tuple(prompt), 40)])
    assert found.generated == alone(target, prompt, 40)


def test_the_shape_that_gives_most_is_found_and_kept():
    target, draft = model(), model(seed=9)  # it knows nothing of the target
    made = engine([target, draft], [(), (1, 1), (1, 1, 1, 1)], batch=1)
    generate(made, [Wanted(tuple(prompt), 30) for prompt in some_prompts(6, seed=10)])
    assert made.tokens < 1.2 * made.steps

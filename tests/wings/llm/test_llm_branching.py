"""One sequence in a round: every outcome of its tree and of its verification is listed, as the engine computes them."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("greenlet")

from megatron.fill.wings.llm.branching import Branching  # noqa: E402
from megatron.fill.wings.llm.sampling import Sampling, distribution  # noqa: E402
from megatron.fill.wings.llm.sequence import GeneratedSequence, Wanted  # noqa: E402
from megatron.fill.wings.llm.speccheck import EXACT, CheckedCase, check_step, random_model  # noqa: E402
from megatron.fill.wings.llm.verify import matching, multi_step, traversal  # noqa: E402
from tests.wings.llm.llm_plainly import plainly_adjusted  # noqa: E402

PROMPT, GENERATED = (1, 1), [1, 2]
SAMPLINGS = [
    Sampling(1.0),
    Sampling(1.0, presence_penalty=1.1),
    Sampling(1.0, frequency_penalty=-0.8),
    Sampling(1.3, repetition_penalty=1.7),
    Sampling(0.8, 0.9, 2, 0.05, 0.4, 0.6, 1.2, ((1, 1.5),)),
]


def logits_of(model, path):
    return torch.tensor(np.log(model(path)) + 1.0, dtype=torch.float32)


def after(model, sampling):
    """The distribution after a path, by the plain definition."""

    def found(path):
        scores = plainly_adjusted(logits_of(model, path), sampling, PROMPT, [*GENERATED, *path])
        return distribution(np.array(scores), sampling)

    return found


def step_of(kind, target, draft, sampling, shape, rule):
    def step(chance):
        sequence = GeneratedSequence(Wanted(PROMPT, 9, sampling), generated=list(GENERATED))
        sequence.cached = [3, 3]
        one = kind(sequence, shape, {1: [[0]]}, chance)
        for level in range(len(shape)):
            nodes = one.levels[1][level]
            one.grow(1, level, torch.stack([logits_of(draft, one.tree.path(node)) for node in nodes]))
        logits = torch.stack([logits_of(target, one.tree.path(node)) for node in range(len(one.tree.tokens))])
        return one.verified(rule, logits, logits.argmax(-1).tolist(), [True] * len(logits))

    return step


@pytest.mark.parametrize("rule", [matching, multi_step, traversal])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (2, 1)], ids=str)
def test_tokens_are_distributed_as_the_definition_says(rule, sampling, shape):
    target, draft = random_model(3, 1, 2.0), random_model(3, 2, 2.0)
    case = CheckedCase("branching", 3, after(target, sampling), (), shape)
    assert check_step(step_of(Branching, target, draft, sampling, shape, rule), case).distance < EXACT


class WithoutPath(Branching):
    """Penalties of the root at every node: a mistake that only a tree makes."""

    def _adjusted(self, node, logits):
        return super()._adjusted(0, logits)


@pytest.mark.parametrize("rule", [matching, multi_step, traversal])
@pytest.mark.parametrize("sampling", SAMPLINGS[1:], ids=str)
def test_penalties_that_do_not_see_the_path_are_found(rule, sampling):
    target, draft = random_model(3, 1, 2.0), random_model(3, 2, 2.0)
    case = CheckedCase("branching", 3, after(target, sampling), (), (1, 1))
    assert check_step(step_of(WithoutPath, target, draft, sampling, (1, 1), rule), case).distance > 1e-4

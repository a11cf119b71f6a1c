"""Is a way to verify token trees exact?  Answered by listing every outcome of it for small vocabularies.

The tokens of one step are extended by the target model's own to a fixed length; these sequences must be distributed as
the target's.  The total variation distance from that is 0, but for rounding, if and only if nothing is lost.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron.fill.wings.llm.chance import Chance, outcomes
from megatron.fill.wings.llm.sampling import Sampling, adjusted, distribution
from megatron.fill.wings.llm.tree import Draft, Model, Tokens, drawn, expand
from megatron.fill.wings.llm.verify import Rule

EXACT = 1e-12
_SAMPLING = Sampling(0.7, 0.95, 4, 0.02, -0.4, 0.7, 1.3, ((0, 1.5), (1, -1.0)))  # every field of it
_PROMPT = np.array([1])  # before the tree, for the repetition penalty


@dataclass(frozen=True, slots=True)
class CheckedCase:
    """A target, its drafts, and the shape of the trees."""

    name: str
    vocabulary: int
    target: Model
    drafts: tuple[Model, ...]
    shape: tuple[int, ...]  # number of each draft's draws below each node, by depth


@dataclass(frozen=True, slots=True)
class CheckedRule:
    """Result of a case."""

    case: CheckedCase
    distance: float  # total variation distance of the sequences from the target's, 0 to 1
    tokens: float  # mean number of tokens in a step, the added one included
    outcomes: int  # number of outcomes that were enumerated

    @property
    def exact(self) -> bool:
        return self.distance < EXACT


def check(rule: Rule, case: CheckedCase, draft: Draft = drawn) -> CheckedRule:
    """List every outcome of one step: expansion and verification."""

    def step(chance: Chance) -> list[int]:
        tree = expand((), case.drafts, case.shape, chance, draft)
        return rule(tree, lambda node: case.target(tree.path(node)), chance)

    return check_step(step, case)


def check_step(step: Callable[[Chance], list[int]], case: CheckedCase) -> CheckedRule:
    """List every outcome of a step of your own, which gives tokens of the case's target."""
    length = len(case.shape) + 1
    found: dict[Tokens, float] = {}
    taken = listed = 0.0
    for probability, tokens in outcomes(step):
        key = tuple(tokens)[:length]
        if key:  # a step without a token would go on for ever: its share is lost
            found[key] = found.get(key, 0.0) + probability
        taken += probability * len(tokens)
        listed += 1
    wanted = _sequences(case.target, case.vocabulary, (), length)
    got = np.zeros_like(wanted)
    for key, share in found.items():
        at = np.ravel_multi_index(key, (case.vocabulary,) * len(key))
        size = case.vocabulary ** (length - len(key))
        part = slice(int(at) * size, (int(at) + 1) * size)
        got[part] += share * _sequences(case.target, case.vocabulary, key, length - len(key))
    return CheckedRule(case, float(np.abs(got - wanted).sum() / 2), taken, int(listed))


def _sequences(model: Model, vocabulary: int, prefix: Tokens, length: int) -> np.ndarray:
    """The probability of every continuation of this length, ``[vocabulary ** length]``, in order."""
    if length == 0:
        return np.ones(1)
    parts = [_sequences(model, vocabulary, (*prefix, token), length - 1) for token in range(vocabulary)]
    return np.concatenate([share * part for share, part in zip(model(prefix), parts, strict=True)])


def random_model(vocabulary: int, seed: int, sharpness: float = 1.0, missing: int = 0) -> Model:
    """A model whose probabilities are random, and always the same after the same tokens.

    Args:
        sharpness: larger is surer of one token.
        missing: so many tokens are impossible, others after each prefix.
    """
    known: dict[Tokens, np.ndarray] = {}

    def model(prefix: Tokens) -> np.ndarray:
        if prefix not in known:
            random = np.random.default_rng((seed, *prefix, len(prefix)))
            weights = random.random(vocabulary) ** sharpness + 1e-3
            weights[random.permutation(vocabulary)[:missing]] = 0.0
            known[prefix] = weights / weights.sum()
        return known[prefix]

    return model


def sampled(model: Model, sampling: Sampling, generated: Tokens = ()) -> Model:
    """The distribution that is drawn from after a model: penalties look at the whole path to a node.

    Args:
        generated: tokens before the tree.
    """

    known: dict[Tokens, np.ndarray] = {}

    def drawn_from(prefix: Tokens) -> np.ndarray:
        if prefix not in known:
            with np.errstate(divide="ignore"):
                logits = np.log(model(prefix)) + 1.0  # some above 0, for the repetition penalty
            known[prefix] = distribution(adjusted(logits, sampling, _PROMPT, generated + prefix), sampling)
        return known[prefix]

    return drawn_from


def cases(quick: bool = False) -> list[CheckedCase]:
    """Chains, trees and several drafts; drafts that are close to the target, far from it, or lack tokens of it.

    Some draw with penalties, a bias, and fewer tokens: what a node's token is drawn from depends on its path.

    Args:
        quick: only those that take less than a second each.
    """
    shapes: Sequence[tuple[int, tuple[int, ...], int]] = [
        (2, (1, 1, 1, 1), 1),
        (2, (2, 2), 1),
        (3, (3, 1), 1),
        (6, (1, 1), 1),
        (6, (3,), 1),
        (3, (1, 1), 2),
    ]
    if not quick:
        shapes = [*shapes, (6, (1, 1, 1, 1), 1), (2, (2, 2, 1), 1), (4, (2, 1, 1), 1), (6, (2, 1), 1), (2, (2, 1), 2)]
    kinds = [("near", 2.0, 0), ("far", 6.0, 0), ("lacking", 2.0, 1)]
    found = []
    for (vocabulary, shape, drafts), (kind, sharpness, missing) in itertools.product(shapes, kinds):
        target = random_model(vocabulary, 1, 2.0, missing if vocabulary > 2 else 0)
        models = tuple(random_model(vocabulary, 2 + one, sharpness, missing) for one in range(drafts))
        name = f"{vocabulary} tokens, <{','.join(map(str, shape))}>" + (f" x {drafts}" if drafts > 1 else "")
        found.append(CheckedCase(f"{name}, draft {kind}", vocabulary, target, models, shape))
        if kind == "near":
            inner = sampled(target, _SAMPLING, (0,)), tuple(sampled(one, _SAMPLING, (0,)) for one in models)
            found.append(CheckedCase(f"{name}, with penalties", vocabulary, *inner, shape))
    return found

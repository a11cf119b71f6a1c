"""Verification of token trees: exact where it should be, and shown not to be where it is known not to be."""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.fill.cli import main
from megatron.fill.wings.llm import verify
from megatron.fill.wings.llm.chance import Chance, Sampled, outcomes
from megatron.fill.wings.llm.speccheck import EXACT, CheckedCase, cases, check, random_model
from megatron.fill.wings.llm.tree import Draft, Model, TokenTree, drawn, expand
from megatron.fill.wings.llm.verify import Rule, Target, matching, multi_step, traversal

LOSSLESS = [matching, multi_step, traversal]
QUICK = cases(quick=True)


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_nothing_is_lost(rule: Rule, case: CheckedCase) -> None:
    found = check(rule, case)
    assert found.distance < EXACT
    assert 1 <= found.tokens <= len(case.shape) + 1


@given(
    st.integers(2, 3),
    st.lists(st.integers(1, 2), min_size=1, max_size=2),
    st.integers(0, 10**6),
    st.sampled_from([0.5, 1.0, 4.0, 20.0]),
    st.integers(0, 1),
    st.sampled_from(LOSSLESS),
)
@settings(max_examples=60)
def test_whatever_the_models_are(vocabulary, shape, seed, sharpness, missing, rule):
    target, draft = random_model(vocabulary, seed, 1.0), random_model(vocabulary, seed + 1, sharpness, missing)
    assert check(rule, CheckedCase("random", vocabulary, target, (draft,), tuple(shape))).distance < EXACT


def test_the_better_rule_takes_more():
    for case in QUICK:
        plain, steps, paths = (check(rule, case).tokens for rule in LOSSLESS)
        assert plain <= steps + 1e-9 or len(case.shape) == 1
        assert steps <= paths + 1e-9
    chain = next(case for case in QUICK if case.shape == (1, 1, 1, 1))
    assert check(traversal, chain).tokens > check(multi_step, chain).tokens + 0.01


def test_a_draft_that_is_the_target_is_taken_whole():
    model = random_model(3, 7)
    case = CheckedCase("itself", 3, model, (model,), (1, 1, 1))
    for rule in (multi_step, traversal):
        assert check(rule, case).tokens == pytest.approx(4)


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("towards", [0.0, 1.0])
def test_a_draft_may_differ_from_the_target_by_rounding_alone(rule: Rule, towards: float) -> None:
    likely = np.array([0.1, 0.9])
    rounded = np.array([np.nextafter(0.1, 1 - towards), np.nextafter(0.9, towards)])
    case = CheckedCase("rounded", 2, lambda prefix: likely, (lambda prefix: rounded,), (2, 1))
    assert check(rule, case).distance < EXACT


# What is known to be wrong, and is in use somewhere.


def greedily(probabilities: np.ndarray, count: int, chance: Chance) -> list[tuple[int, np.ndarray]]:
    """The draft's best token, verified as if it had been drawn."""
    return [(int(np.argmax(probabilities)), probabilities)] * count


def merged(probabilities: np.ndarray, count: int, chance: Chance) -> list[tuple[int, np.ndarray]]:
    """Draws of which repeated ones are dropped."""
    return list({token: (token, probabilities) for token, _ in drawn(probabilities, count, chance)}.values())


def best(probabilities: np.ndarray, count: int, chance: Chance) -> list[tuple[int, np.ndarray]]:
    """The most probable ones, verified as if they had been drawn."""
    return [(int(token), probabilities) for token in np.argsort(-probabilities)[:count]]


def without_replacement(probabilities: np.ndarray, count: int, chance: Chance) -> list[tuple[int, np.ndarray]]:
    """Different ones, in any order, each verified with the probability that it had at first."""
    left, found = probabilities.copy(), []
    for _ in range(min(count, int(np.count_nonzero(left)))):
        token = chance.draw(left)
        left[token] = 0.0
        found.append((token, probabilities))
    if len(found) == 2 and chance.happens(0.5):
        found.reverse()
    return found


def cooler(probabilities: np.ndarray, count: int, chance: Chance) -> list[tuple[int, np.ndarray]]:
    """Drawn at a temperature of its own, verified at that of the target."""
    return [(token, probabilities) for token, _ in drawn(probabilities**2 / (probabilities**2).sum(), count, chance)]


def nucleus(probabilities: np.ndarray, count: int, chance: Chance) -> list[tuple[int, np.ndarray]]:
    """Drawn from the most probable ones only, verified as if from all."""
    kept = np.where(probabilities >= np.sort(probabilities)[-2], probabilities, 0.0)
    return [(token, probabilities) for token, _ in drawn(kept / kept.sum(), count, chance)]


def rounded(probabilities: np.ndarray, count: int, chance: Chance) -> list[tuple[int, np.ndarray]]:
    """Drawn in half precision, verified in double."""
    return [(token, probabilities) for token, _ in drawn(probabilities.astype(np.float16), count, chance)]


@pytest.mark.parametrize("rule", [multi_step, traversal])
@pytest.mark.parametrize(
    ("draft", "least"),
    [
        (greedily, 0.05),
        (merged, 0.01),
        (best, 0.05),
        (without_replacement, 0.02),
        (cooler, 0.02),
        (nucleus, 0.02),
        (rounded, 1e-6),
    ],
)
def test_what_is_wrong_is_found(rule: Rule, draft: Draft, least: float) -> None:
    case = CheckedCase("wide", 4, random_model(4, 1, 2.0), (random_model(4, 2, 2.0),), (2,))
    assert check(rule, case, draft).distance > least
    assert check(rule, case).distance < EXACT


def follow(model: Model, tree: TokenTree) -> Target:
    return lambda node: model(tree.path(node))


def test_tokens_drawn_are_distributed_as_the_targets():
    stats = pytest.importorskip("scipy.stats")
    target, drafts = random_model(5, 3), (random_model(5, 4), random_model(5, 5))
    wanted = np.array([target(())[a] * target((a,))[b] for a in range(5) for b in range(5)])
    for rule in LOSSLESS:
        chance, counts = Sampled(np.random.default_rng(0)), Counter[tuple[int, int]]()
        for _ in range(4000):
            tree = expand((), drafts, (2, 1), chance)
            tokens = rule(tree, follow(target, tree), chance)
            while len(tokens) < 2:
                tokens.append(chance.draw(target(tuple(tokens))))
            counts[tokens[0], tokens[1]] += 1
        found = [counts[a, b] for a in range(5) for b in range(5)]
        assert stats.chisquare(found, wanted * 4000).pvalue > 0.001


def test_greedy_takes_the_path_of_the_best_tokens():
    tree = TokenTree()
    half = np.full(4, 0.25)
    one = tree.add(0, 2, half)
    two = tree.add(one, 3, half)
    tree.add(0, 1, half)
    answers = {0: [0, 0, 1, 0], one: [0, 0, 0, 1], two: [1, 0, 0, 0]}
    assert verify.follow(tree, lambda node: int(np.argmax(answers[node]))) == [2, 3, 0]
    assert verify.follow(tree, lambda node: 0) == [0]


def test_a_node_attends_to_its_ancestors_and_draws_of_one_token_share_a_node():
    tree, half = TokenTree(), np.full(4, 0.25)
    one = tree.add(0, 2, half)
    other = tree.add(0, 1, half)
    assert tree.add(0, 2, half) == one
    two = tree.add(one, 1, half)
    assert [len(draws) for draws in tree.draws] == [3, 1, 0, 0]
    assert tree.path(two) == (2, 1)
    assert tree.depths == [0, 1, 1, 2]
    assert [sorted(np.flatnonzero(row)) for row in tree.mask()] == [[0], [0, one], [0, other], [0, one, two]]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=5).filter(any), st.integers(0, 2**32))
def test_an_index_is_drawn_only_where_there_is_weight(weights, seed):
    at = Sampled(np.random.default_rng(seed)).draw(np.array(weights))
    assert weights[at] > 0


def test_all_outcomes_are_listed_with_their_probabilities():
    def experiment(chance: Chance) -> str:
        if chance.happens(0.25):
            return "a"
        return "bc"[chance.draw(np.array([1.0, 3.0]))]

    found = list(outcomes(experiment))
    assert found == [(0.25, "a"), (0.75 * 0.25, "b"), (0.75 * 0.75, "c")]


def test_the_command_says_which_rules_are_exact(capsys, monkeypatch):
    assert called(monkeypatch, "--quick") == 0
    said = capsys.readouterr().out
    assert [line.split(":")[0] for line in said.splitlines()[::2]] == ["matching", "multi_step", "traversal"]
    assert said.count(": exact: ") == 3
    assert called(monkeypatch, "--quick", "--json", "--draft", f"{__name__}:greedily", "multi_step") == 1
    found = json.loads(capsys.readouterr().out)
    assert {one["rule"] for one in found} == {"multi_step"}
    assert max(one["distance"] for one in found) > 0.05
    assert called(monkeypatch, "--quick", "--draft", f"{__name__}:greedily", "traversal") == 1
    assert "traversal: NOT EXACT in " in capsys.readouterr().out


def called(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    monkeypatch.setattr(sys, "argv", ["pipefill", "speccheck", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code or 0


def broken(tree: TokenTree, target: Any, chance: Chance) -> list[int]:
    raise IndexError("no leaf")


def test_a_rule_that_gives_no_token_is_not_exact() -> None:
    for case in cases(quick=True)[:3]:
        assert not check(lambda tree, target, chance: [], case).exact

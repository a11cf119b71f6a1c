"""Verification of a token tree: the tokens that the large model takes, and the one that it adds.

All rules give tokens that are distributed as the large model's own, whatever the drafts are, provided that each draw of
the tree was drawn from the distribution that it names, independently of the others (``tree.drawn``).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from megatron.fill.wings.llm.chance import Chance
from megatron.fill.wings.llm.tree import TokenTree

Target = Callable[[int], np.ndarray]
"""From a node to the large model's probabilities after it, ``[vocabulary]``."""
Rule = Callable[[TokenTree, Target, Chance], list[int]]
"""The tokens that are taken: a path of the tree from the root, and one more."""


def matching(tree: TokenTree, target: Target, chance: Chance) -> list[int]:
    """Sample from the large model at each node, as far as the tree has it (naive sampling, section 4.3)."""
    return follow(tree, lambda node: chance.draw(target(node)))


def multi_step(tree: TokenTree, target: Target, chance: Chance) -> list[int]:
    """Multi-step speculative sampling (SpecInfer, section 4.3 and algorithm 2).

    At each node one draw after the other is taken with probability p/q; after each that is not, p becomes what is left
    of it, ``max(0, p - q)`` made to sum to 1.
    """
    node, taken = 0, []
    while True:
        wanted = target(node)
        for draw in tree.draws[node]:
            token = tree.tokens[draw.node]
            if chance.happens(wanted[token] / draw.probabilities[token]):
                taken.append(token)
                node = draw.node
                break
            wanted = _left(wanted, draw.probabilities)[0]
        else:
            return [*taken, chance.draw(wanted)]


def traversal(tree: TokenTree, target: Target, chance: Chance) -> list[int]:
    """Traversal Verification (arXiv 2505.12398): from the leaves to the root, a whole path at a time.

    A node may be taken by a path that leads through it although it would have been refused by itself: this takes more
    tokens than ``multi_step``.
    """
    return _visit(tree, target, chance, 0, 1.0) or []


def _visit(tree: TokenTree, target: Target, chance: Chance, node: int, share: float) -> list[int] | None:
    """Tokens after a node, with the probability ``share`` that it is taken; None otherwise.

    A draw of token x with probability q(x) is taken with probability min(share * p(x) / q(x), 1), by one of the paths
    through it.  What is still wanted then is max(0, share * p - q), of what is still possible.
    """
    wanted = target(node)
    for draw in tree.draws[node]:
        token = tree.tokens[draw.node]
        below = min(1.0, share * wanted[token] / draw.probabilities[token])
        # Of draws that led to the same node, the first one has had all that is below it.
        first = next(one for one in tree.draws[node] if one.node == draw.node) is draw
        if first:
            found = _visit(tree, target, chance, draw.node, below)
        else:
            found = [chance.draw(target(draw.node))] if chance.happens(below) else None
        if found is not None:
            return [token, *found]
        wanted, left = _left(share * wanted, draw.probabilities)
        # In this order, the root's share stays 1 also where draft and target differ by rounding alone.
        share = left / (1.0 - share + left) if left > 0 else float(node == 0)
    return [chance.draw(wanted)] if node == 0 or chance.happens(share) else None


def _left(wanted: np.ndarray, drawn: np.ndarray) -> tuple[np.ndarray, float]:
    """The wanted distribution less what a draw could give, normalised, and its sum before."""
    rest = np.maximum(wanted - drawn, 0.0)
    total = float(rest.sum())
    return (rest / total, total) if total > 0 else (wanted, 0.0)


def follow(tree: TokenTree, choose: Callable[[int], int]) -> list[int]:
    """The token that is chosen after each node, as far as the tree has it, and one more."""
    node, taken = 0, []
    while True:
        token = choose(node)
        taken.append(token)
        child = tree.child(node, token)
        if child is None:
            return taken
        node = child

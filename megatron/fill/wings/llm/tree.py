"""Token trees: what one or several draft models expect to come next (SpecInfer, section 3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron.fill.wings.llm.chance import Chance

Tokens = tuple[int, ...]
Model = Callable[[Tokens], np.ndarray]
"""From the tokens so far to the probability of each next one, ``[vocabulary]``."""
Draft = Callable[[np.ndarray, int, Chance], Sequence[tuple[int, np.ndarray]]]
"""From a draft's probabilities to so many next tokens, each with the distribution that it was drawn from."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Draw of a token below a node."""

    node: int  # node that it led to; two draws of the same token lead to the same node
    probabilities: np.ndarray  # distribution that it was drawn from, ``[vocabulary]``


@dataclass(slots=True)
class TokenTree:
    """A tree of tokens; every node is the sequence from the root to it, and node 0, the root, is the empty one.

    A parent comes before its children.
    """

    tokens: list[int] = field(default_factory=lambda: [-1])  # each node's; -1 for the root
    parents: list[int] = field(default_factory=lambda: [-1])  # each node's; -1 for the root
    depths: list[int] = field(default_factory=lambda: [0])
    draws: list[list[Draw]] = field(default_factory=lambda: [[]])
    """Draws below each node, in their order, repeated ones too: verification needs all."""

    def add(self, parent: int, token: int, probabilities: np.ndarray) -> int:
        """Note a draw of ``token`` below ``parent``; its node, which may be there already."""
        node = self.child(parent, token)
        if node is None:
            node = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(self.depths[parent] + 1)
            self.draws.append([])
        self.draws[parent].append(Draw(node, probabilities))
        return node

    def child(self, parent: int, token: int) -> int | None:
        """The node of ``token`` below ``parent``; None for none."""
        return next((draw.node for draw in self.draws[parent] if self.tokens[draw.node] == token), None)

    def path(self, node: int) -> Tokens:
        """The tokens from the root to a node."""
        found: list[int] = []
        while node > 0:
            found.append(self.tokens[node])
            node = self.parents[node]
        return tuple(reversed(found))

    def mask(self) -> np.ndarray:
        """Nodes that each node attends to: its ancestors and itself, ``[nodes, nodes]`` of bool (section 4.2)."""
        seen = np.eye(len(self.tokens), dtype=bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                seen[node] |= seen[parent]
        return seen


def drawn(probabilities: np.ndarray, count: int, chance: Chance) -> list[tuple[int, np.ndarray]]:
    """So many independent draws, with replacement: what every verification here relies on."""
    return [(chance.draw(probabilities), probabilities) for _ in range(count)]


def expand(
    prefix: Tokens, drafts: Sequence[Model], shape: Sequence[int], chance: Chance, draft: Draft = drawn
) -> TokenTree:
    """The union of the trees of all drafts (definition 3.2): ``shape[i]`` draws below each own node of depth i.

    Args:
        prefix: the tokens so far.
        draft: draws a draft's tokens.
    """
    tree = TokenTree()
    levels = [[0] for _ in drafts]
    for width in shape:
        for which, model in enumerate(drafts):
            following: dict[int, None] = {}  # in order
            for node in levels[which]:
                for token, probabilities in draft(model(prefix + tree.path(node)), width, chance):
                    following[tree.add(node, token, probabilities)] = None
            levels[which] = list(following)
    return tree

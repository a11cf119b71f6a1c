"""A sequence in a round of the engine: its token tree grows, is verified, and gives the next tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron.fill.wings.llm.chance import Chance
from megatron.fill.wings.llm.passes import RowInput
from megatron.fill.wings.llm.sampling import adjusted, distribution, logarithms
from megatron.fill.wings.llm.sequence import GeneratedSequence, TokenNote
from megatron.fill.wings.llm.shapes import Shape
from megatron.fill.wings.llm.tree import TokenTree, drawn
from megatron.fill.wings.llm.verify import Rule, follow

_UNKNOWN = np.empty(0)  # the distribution of a token that was not drawn
_NONE = np.empty(0, dtype=np.int64)


class NotFiniteError(Exception):
    """The large model's logits at a node are not finite, so no token can be chosen."""


def tree_row(tree: TokenTree, nodes: Sequence[int], pages: Sequence[int], root: int, token: int) -> RowInput:
    """Nodes of a tree as tokens of a pass: each has a column of its own, from that of the sequence's last token on.

    Args:
        root: the place of the sequence's last token, which is the tree's root; ``token`` is its id.
    """
    end = max(nodes) + 1
    tokens = [tree.tokens[node] if node else token for node in nodes]
    visible = np.ones((len(nodes), root + end), dtype=bool)
    visible[:, root:] = tree.mask()[nodes, :end]
    columns = [root + node for node in nodes]
    held = np.concatenate([np.arange(root), root + np.asarray(tree.depths[:end])])
    return RowInput(pages, tokens, columns, [root + tree.depths[node] for node in nodes], visible, held)


@dataclass(slots=True, eq=False)
class Branching:
    """A sequence in a round."""

    sequence: GeneratedSequence
    shape: Shape  # shape of its tree
    levels: dict[int, list[list[int]]]  # each participating draft's own nodes, by depth
    chance: Chance  # randomness of the round
    tree: TokenTree = field(default_factory=TokenTree)

    def grows(self, draft: int, level: int) -> bool:
        """True if a draft is to propose the tokens after this level."""
        levels = self.levels.get(draft, [])
        return level < min(len(levels), len(self.shape)) and bool(levels[level])

    def row(self, nodes: list[int]) -> RowInput:
        """Nodes of the tree as tokens of a pass."""
        return tree_row(self.tree, nodes, self.sequence.pages, self.sequence.length - 1, self.sequence.tokens[-1])

    def all_nodes(self) -> RowInput:
        """The whole tree, for the pass that verifies it."""
        return self.row(list(range(len(self.tree.tokens))))

    def first_row(self, draft: int) -> RowInput:
        """Tokens that a draft computes before it proposes the first level: the last one, and those not cached yet."""
        cached = min(self.sequence.cached[draft], self.sequence.length - 1)
        return RowInput.following(self.sequence.pages, self.sequence.tokens[cached:], cached)

    def grow(self, draft: int, level: int, logits: Any) -> None:
        """Add a level of a draft's proposals.

        Args:
            logits: logits of the pass over ``first_row`` or over the nodes of the level, ``[tokens, vocabulary]``.
        """
        nodes, sequence = self.levels[draft][level], self.sequence
        if level == 0:  # its answer is in the place of the last token
            last = max(0, sequence.length - 1 - sequence.cached[draft])
            sequence.cached[draft] = sequence.length
            logits = logits[last : last + 1]
        else:
            logits = logits[: len(nodes)]
        if not bool(logits.amax(-1).isfinite().all()):
            sequence.tainted = True
            self.levels[draft].append([])  # it knows nothing that could be verified
            return
        self.levels[draft].append(self._proposed(nodes, self.shape[level], logits))

    def _proposed(self, nodes: list[int], width: int, logits: Any) -> list[int]:
        sampling = self.sequence.wanted.sampling
        found: dict[int, None] = {}  # in order
        if sampling.temperature == 0:
            for node, tokens in zip(nodes, self._best(nodes, width, logits), strict=True):
                for token in tokens:
                    found[self.tree.add(node, token, _UNKNOWN)] = None
            return list(found)
        for node, row in zip(nodes, logits.float().cpu().numpy(), strict=True):
            probabilities = distribution(self._adjusted(node, row), sampling)
            for token, origin in drawn(probabilities, width, self.chance):
                found[self.tree.add(node, token, origin)] = None
        return list(found)

    def _best(self, nodes: list[int], width: int, logits: Any) -> list[list[int]]:
        """The most probable tokens after each node, the best first."""
        width = min(width, logits.shape[-1])
        if self._as_it_is:
            found: list[list[int]] = logits.topk(width, dim=-1).indices.tolist()
            return found
        rows = logits.float().cpu().numpy()
        scores = [self._adjusted(node, row) for node, row in zip(nodes, rows, strict=True)]
        orders = [np.argsort(-row, kind="stable")[:width] for row in scores]
        return [order[row[order] > -np.inf].tolist() for order, row in zip(orders, scores, strict=True)]

    @property
    def _as_it_is(self) -> bool:
        """True if neither sampling nor a grammar changes the model's logits."""
        return self.sequence.wanted.sampling.as_it_is and self.sequence.grammar is None

    def _adjusted(self, node: int, logits: np.ndarray) -> np.ndarray:
        """The logits after a node, with what was taken on the path to it."""
        if self._as_it_is:
            return logits
        sequence, sampling, path = self.sequence, self.sequence.wanted.sampling, self.tree.path(node)
        prompt = sequence.prompt_ids if sampling.repetition_penalty != 1 else _NONE
        found = adjusted(logits, sampling, prompt, [*sequence.generated, *path])
        if sequence.grammar is not None:
            allowed = sequence.grammar.allowed(sequence.generated, path)[: len(found)]
            found[: len(allowed)][~allowed] = -np.inf
            found[len(allowed) :] = -np.inf  # that the tokenizer does not have
        return found

    def verified(self, rule: Rule, logits: Any, best: list[int], finite: list[bool]) -> list[int]:
        """The next tokens.

        Args:
            logits: the large model's logits at each node, ``[nodes, vocabulary]``.
            best: its most probable token at each node.
            finite: True for each node whose largest logit is finite.

        Raises:
            NotFiniteError: it is not finite at a node that decides.
        """
        sampling = self.sequence.wanted.sampling

        def sure(node: int) -> int:
            if not finite[node]:
                count = len(self.sequence.generated) + self.tree.depths[node]
                raise NotFiniteError(
                    f"the model's logits are not finite numbers (NaN or infinite) after {count} generated tokens"
                )
            return node

        if sampling.temperature == 0 and self._as_it_is:
            return follow(self.tree, lambda node: best[sure(node)])
        rows = logits.float().cpu().numpy()
        if sampling.temperature == 0:
            return follow(self.tree, lambda node: int(np.argmax(self._adjusted(node, rows[sure(node)]))))
        return rule(self.tree, lambda node: distribution(self._adjusted(node, rows[sure(node)]), sampling), self.chance)

    def path(self, tokens: Sequence[int]) -> list[int]:
        """The nodes that tokens lead to from the root; the last token is not in the tree, or below a leaf."""
        nodes, node = [], 0
        for token in tokens[:-1]:
            child = self.tree.child(node, token)
            assert child is not None
            nodes.append(child)
            node = child
        return nodes

    def seen(self, model: int, path: list[int]) -> list[int]:
        """The first nodes of a path whose keys and values a model has: a draft has its own, but for the leaves."""
        if not model:
            return path
        levels = self.levels[model][1 : len(self.shape)]
        return [node for node, level in zip(path, levels, strict=False) if node in level]

    def notes(self, tokens: list[int], path: list[int], logits: Any) -> list[TokenNote]:
        """The log probabilities that the request asks for, of each token."""
        alternatives = self.sequence.wanted.alternatives
        if alternatives is None:
            return []
        notes = []
        for token, node in zip(tokens, [0, *path], strict=True):
            row = logarithms(logits[node].float().cpu().numpy())
            order = np.argsort(-row, kind="stable")[:alternatives]
            notes.append(TokenNote(token, float(row[token]), tuple((int(index), float(row[index])) for index in order)))
        return notes

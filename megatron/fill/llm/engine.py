"""The engine: sequences of several requests are generated together, in steps that fit into bubbles.

A round takes each sequence by some tokens.  Its nodes are passes over the prompts that are not computed yet, passes of
the drafts that grow a token tree level by level, the large model's pass that verifies all trees (SpecInfer, sections 3
and 4), and the commit.  Each pass is cut by layers.  Nothing but a commit changes what was generated, so a round may be
begun again at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron.fill.llm.chance import Sampled
from megatron.fill.llm.passes import ModelRunner, RowInput
from megatron.fill.llm.room import KeyValueRoom
from megatron.fill.llm.sampling import distribution, logarithms
from megatron.fill.llm.sequence import Decode, GeneratedSequence, TokenNote
from megatron.fill.llm.shapes import Shape, ShapeChooser, most_nodes
from megatron.fill.llm.tree import TokenTree, drawn
from megatron.fill.llm.verify import Rule, follow

_UNKNOWN = np.empty(0)  # the distribution of a token that was not drawn
_BEHIND = 2  # tokens that a draft's first pass of a round catches up with besides the last one


@dataclass(slots=True, eq=False)
class _Branching:
    """A sequence in this round.

    Attributes:
        levels: of each draft that takes part: its own nodes, by depth.
    """

    sequence: GeneratedSequence
    slot: int
    shape: Shape
    levels: dict[int, list[list[int]]]
    chance: Sampled
    tree: TokenTree = field(default_factory=TokenTree)


@dataclass(slots=True)
class _Round:
    shape: Shape = ()
    prefill: dict[int, list[RowInput]] = field(default_factory=dict)  # by model
    branching: list[_Branching] = field(default_factory=list)
    logits: Any = None
    tokens: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class EngineCounts:
    """What was done so far.

    Attributes:
        tokens: generated.
        steps: of the large model: a pass over five sequences counts as five.
    """

    tokens: int = 0
    steps: int = 0


class Engine:
    """Generates sequences with a large model and any number of drafts.

    Args:
        runners: the large model, then the drafts.
        decode: token ids to text.
        ends: token ids that end a sequence.
        rule: verifies the trees of sampled sequences.
        shapes: of token trees, to choose from by what they bring; one is not chosen but taken.
        batch: sequences at a time.
        chunk: tokens of prompts in a pass.
        most_bytes: of keys and values; None for no limit.
        clock: in seconds, to tell which shape is the fastest.

    Attributes:
        runners: as given.
        finished: sequences that have ended; the owner takes them out.
    """

    def __init__(
        self,
        runners: Sequence[ModelRunner],
        decode: Decode,
        ends: Collection[int],
        rule: Rule,
        shapes: Sequence[Shape],
        batch: int,
        chunk: int,
        most_bytes: int | None,
        clock: Callable[[], float],
    ) -> None:
        self.runners, self._decode, self._ends, self._rule = list(runners), decode, ends, rule
        self._chooser, self._clock = ShapeChooser(shapes), clock
        self.chunk = chunk
        self._deepest = max(map(len, shapes))
        spare = max(most_nodes(shape, len(runners) - 1) for shape in shapes)
        self.room = KeyValueRoom([runner.cache for runner in runners], batch, spare, most_bytes)
        self.counts = EngineCounts()
        self.finished: list[GeneratedSequence] = []
        self._round = _Round()
        self._nodes = self._list_nodes()

    def node_names(self) -> tuple[str, ...]:
        """The nodes of a round, in order; a round leaves out those that have nothing to do."""
        names = []
        for kind, model, level, piece in self._nodes:
            pieces = self.runners[model].passes.pieces
            parts = [kind]
            if kind in ("prefill", "draft") and model:
                parts.append(f"by draft {model - 1}" if kind == "prefill" else f"{model - 1} level {level}")
            if kind in ("prefill", "draft", "verify") and pieces > 1:
                parts.append(f"piece {piece}")
            names.append(" ".join(parts))
        return tuple(names)

    @property
    def idle(self) -> bool:
        """Whether nothing is left to generate."""
        return not (self.room.active or self.room.waiting)

    def run(self, node: int) -> int:
        """Run a node of the round; the number of the next one, 0 after the last."""
        kind, model, level, piece = self._nodes[node]
        before = self._clock()
        if kind == "admit":
            self._begin_round()
        elif kind == "commit":
            self._commit()
        else:
            runner = self.runners[model]
            if piece == 0:
                runner.begin(self._rows(kind, model, level), logits=kind != "prefill")
            if runner.passes.run():
                self._ended(kind, model, level, runner.passes.result)
        following = next((at for at in range(node + 1, len(self._nodes)) if self._is_needed(at, node)), 0)
        self._round.seconds += self._clock() - before
        if not following:
            self._learn()
        return following

    def abandon(self) -> None:
        """The round is to be begun again, with its first node."""
        for runner in self.runners:
            runner.passes.abandon()
        self._round = _Round()

    def _list_nodes(self) -> list[tuple[str, int, int, int]]:
        """Kind, model, level, piece of each."""
        nodes = [("admit", 0, 0, 0)]
        for model, runner in enumerate(self.runners):
            nodes += [("prefill", model, 0, piece) for piece in range(runner.passes.pieces)]
        for level in range(self._deepest):
            for model, runner in enumerate(self.runners[1:], 1):
                nodes += [("draft", model, level, piece) for piece in range(runner.passes.pieces)]
        nodes += [("verify", 0, 0, piece) for piece in range(self.runners[0].passes.pieces)]
        return [*nodes, ("commit", 0, 0, 0)]

    def _is_needed(self, at: int, now: int) -> bool:
        kind, model, level, piece = self._nodes[at]
        if piece:
            return self._nodes[now][:3] == (kind, model, level)  # it has begun
        if kind == "prefill":
            return model in self._round.prefill
        if kind == "draft":
            return any(self._grows(one, model, level) for one in self._round.branching)
        return kind == "commit" or bool(self._round.branching)

    def _begin_round(self) -> None:
        self.room.admit()
        self._round = this = _Round(self._chooser.choose())
        late = set()  # slots: not all is computed that their next tokens need
        drafting: dict[int, list[int]] = {}  # models, by slot
        for model, runner in enumerate(self.runners):
            left, rows, behind = self.chunk, [], _BEHIND if model else 0
            for slot, sequence in enumerate(self.room.active):
                if model and not (this.shape and sequence.length + len(this.shape) <= runner.context):
                    continue
                cached, wanted = sequence.cached[model], sequence.length - 1
                count = min(left, wanted - cached)
                if wanted - cached > behind and count:
                    rows.append(RowInput.following(slot, sequence.tokens[cached : cached + count], cached))
                    left -= count
                    cached += count
                if wanted - cached > behind:
                    late.add(slot)
                if model:
                    drafting.setdefault(slot, []).append(model)
            if rows:
                this.prefill[model] = rows
        for slot in range(len(self.room.active)):
            if slot not in late:
                this.branching.append(self._branch(slot, drafting.get(slot, [])))

    def _branch(self, slot: int, drafts: list[int]) -> _Branching:
        sequence = self.room.active[slot]
        shape = self._round.shape[: sequence.left - 1] if drafts else ()
        # By place: a round that is begun again, in another process too, draws the same.
        chance = Sampled(np.random.default_rng((*sequence.wanted.seed, len(sequence.generated))))
        return _Branching(sequence, slot, shape, {model: [[0]] for model in drafts if shape}, chance)

    def _grows(self, one: _Branching, model: int, level: int) -> bool:
        return model in one.levels and level < len(one.shape)

    def _rows(self, kind: str, model: int, level: int) -> list[RowInput]:
        if kind == "prefill":
            return self._round.prefill[model]
        if kind == "verify":
            return [_nodes_of(one, list(range(len(one.tree.tokens)))) for one in self._round.branching]
        growing = [one for one in self._round.branching if self._grows(one, model, level)]
        if level:
            return [_nodes_of(one, one.levels[model][level]) for one in growing]
        rows = []
        for one in growing:
            cached = min(one.sequence.cached[model], one.sequence.length - 1)
            rows.append(RowInput.following(one.slot, one.sequence.tokens[cached:], cached))
        return rows

    def _ended(self, kind: str, model: int, level: int, logits: Any) -> None:
        if kind == "prefill":
            for row in self._round.prefill[model]:
                self.room.active[row.slot].cached[model] += len(row.tokens)
        elif kind == "verify":
            self._round.logits = logits
        else:
            growing = [one for one in self._round.branching if self._grows(one, model, level)]
            for at, one in enumerate(growing):
                nodes, sequence = one.levels[model][level], one.sequence
                if level == 0:  # its answer is in the place of the last token
                    last = max(0, sequence.length - 1 - sequence.cached[model])
                    sequence.cached[model] = sequence.length
                    found = self._grow(one, nodes, one.shape[level], logits[at, last : last + 1])
                else:
                    found = self._grow(one, nodes, one.shape[level], logits[at, : len(nodes)])
                one.levels[model].append(found)

    def _grow(self, one: _Branching, nodes: list[int], width: int, logits: Any) -> list[int]:
        """Add what a draft expects after nodes, ``[nodes, vocabulary]``; the nodes that this leads to."""
        wanted = one.sequence.wanted
        found: dict[int, None] = {}  # in order
        if wanted.temperature == 0:
            best = logits.topk(min(width, logits.shape[-1]), dim=-1).indices.tolist()
            for node, tokens in zip(nodes, best, strict=True):
                for token in tokens:
                    found[one.tree.add(node, token, _UNKNOWN)] = None
            return list(found)
        for node, row in zip(nodes, logits.float().cpu().numpy(), strict=True):
            probabilities = distribution(row, wanted.temperature, wanted.top_p)
            for token, origin in drawn(probabilities, width, one.chance):
                found[one.tree.add(node, token, origin)] = None
        return list(found)

    def _commit(self) -> None:
        """Verify the trees, and keep what was taken."""
        this, room = self._round, self.room
        if not this.branching:
            return
        best = this.logits.argmax(-1).tolist()
        moves: list[tuple[list[int], list[list[int]], list[list[int]]]] = [([], [], []) for _ in self.runners]
        for at, one in enumerate(this.branching):
            sequence, nodes = one.sequence, len(one.tree.tokens)
            tokens = self._verified(one, this.logits[at, :nodes], best[at])
            path = _path(one.tree, tokens)
            notes = self._notes(one, tokens, path, this.logits[at, :nodes])
            last = sequence.length - 1  # the column of the root
            this.tokens += sequence.take(tokens, notes, self._ends, self._decode)
            for model in (0, *one.levels):
                kept = path
                if model:  # it has seen its own nodes, but for the leaves
                    levels = one.levels[model][1 : len(one.shape)]
                    kept = [node for node, level in zip(path, levels, strict=False) if node in level]
                sequence.cached[model] = last + 1 + len(kept)
                moved = [(last + node, last + place) for place, node in enumerate(kept, 1) if node != place]
                moves[model][0].append(one.slot)
                moves[model][1].append([source for source, _ in moved])
                moves[model][2].append([target for _, target in moved])
        self.counts.tokens += this.tokens
        self.counts.steps += len(this.branching)
        for runner, (slots, sources, targets) in zip(self.runners, moves, strict=True):
            runner.cache.compact(slots, sources, targets)
        for one in this.branching:
            if one.sequence.finish is not None:
                room.release(one.sequence)
                self.finished.append(one.sequence)

    def _verified(self, one: _Branching, logits: Any, best: list[int]) -> list[int]:
        wanted = one.sequence.wanted
        if wanted.temperature == 0:
            return follow(one.tree, best.__getitem__)
        rows = logits.float().cpu().numpy()
        return self._rule(one.tree, lambda node: distribution(rows[node], wanted.temperature, wanted.top_p), one.chance)

    def _notes(self, one: _Branching, tokens: list[int], path: list[int], logits: Any) -> list[TokenNote]:
        alternatives = one.sequence.wanted.alternatives
        if alternatives is None:
            return []
        notes = []
        for token, node in zip(tokens, [0, *path], strict=True):
            row = logarithms(logits[node].float().cpu().numpy())
            order = np.argsort(-row, kind="stable")[:alternatives]
            notes.append(TokenNote(token, float(row[token]), tuple((int(index), float(row[index])) for index in order)))
        return notes

    def _learn(self) -> None:
        """Note what the round says of its shape: nothing, if prompts were computed too."""
        this = self._round
        if this.branching:
            self._chooser.observe(this.shape, None if this.prefill else this.tokens, this.seconds)


def _nodes_of(one: _Branching, nodes: list[int]) -> RowInput:
    """Nodes of a tree; the root's column is that of the last token."""
    tree, root, end = one.tree, one.sequence.length - 1, max(nodes) + 1
    depths = tree.depths()
    tokens = [tree.tokens[node] if node else one.sequence.tokens[-1] for node in nodes]
    visible = np.ones((len(nodes), root + end), dtype=bool)
    visible[:, root:] = tree.mask()[nodes, :end]
    columns = [root + node for node in nodes]
    return RowInput(one.slot, tokens, columns, [root + depths[node] for node in nodes], visible)


def _path(tree: TokenTree, tokens: Sequence[int]) -> list[int]:
    """The nodes that tokens lead to from the root; the last token is not in the tree, or below a leaf."""
    nodes, node = [], 0
    for token in tokens[:-1]:
        child = tree.child(node, token)
        assert child is not None
        nodes.append(child)
        node = child
    return nodes

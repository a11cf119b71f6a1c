"""The engine: sequences of several requests are generated together, in steps that fit into bubbles.

A round takes each sequence by some tokens.  Its nodes are passes over the prompts that are not computed yet, passes of
the drafts that grow a token tree level by level, the large model's pass that verifies all trees (SpecInfer, sections 3
and 4), and the commit.  Each pass is cut by layers.  Nothing but a commit changes what was generated, so a round may be
begun again at any time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron.fill.wings.llm.branching import Branching, NotFiniteError
from megatron.fill.wings.llm.chance import Sampled
from megatron.fill.wings.llm.passes import ModelRunner, RowInput
from megatron.fill.wings.llm.room import KeyValueRoom
from megatron.fill.wings.llm.sequence import Decode, GeneratedSequence, Wanted
from megatron.fill.wings.llm.shapes import Shape, ShapeChooser, most_nodes
from megatron.fill.wings.llm.verify import Rule

_BEHIND = 2  # tokens that a draft's first pass of a round catches up with besides the last one


@dataclass(slots=True)
class _Round:
    shape: Shape = ()
    prefill: dict[int, list[tuple[GeneratedSequence, RowInput]]] = field(default_factory=dict)  # by model
    branching: list[Branching] = field(default_factory=list)
    logits: Any = None
    tokens: int = 0
    seconds: float = 0.0


class Engine:
    """Generates sequences with a large model and any number of drafts.

    Args:
        runners: the large model, then the drafts.
        decode: token ids to text.
        ends: token ids that end a sequence.
        rule: verifies the trees of sampled sequences.
        shapes: shapes of token trees; with several, the fastest by measurement is used.
        batch: number of sequences at a time.
        chunk: number of prompt tokens in a pass.
        clock: returns seconds; measures the shapes.
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
        clock: Callable[[], float],
    ) -> None:
        self.runners, self._decode, self._ends, self._rule = list(runners), decode, ends, rule
        self._chooser, self._clock = ShapeChooser(shapes), clock
        self.chunk = chunk
        self._deepest = max(map(len, shapes))
        spare = max(most_nodes(shape, len(runners) - 1) for shape in shapes)
        self.room = KeyValueRoom([runner.cache for runner in runners], batch, spare)
        self.taken: Counter[int] = Counter()  # steps of the large model, by the tokens that they gave
        self.finished: list[GeneratedSequence] = []  # the owner takes them out
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
    def tokens(self) -> int:
        """Tokens generated so far."""
        return sum(tokens * steps for tokens, steps in self.taken.items())

    @property
    def steps(self) -> int:
        """The large model's steps so far; a pass over five sequences is five steps."""
        return self.taken.total()

    @property
    def idle(self) -> bool:
        """True if nothing is left to generate."""
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

    def fill_to_measure(self, tokens: int) -> None:
        """Have a full batch, and a chunk of one prompt: so every node has as much to do as it ever has.

        Args:
            tokens: number of each sequence's tokens before the round.
        """
        room = self.room
        for sequence in list(room.active):
            room.release(sequence)
        room.waiting.clear()
        length = min(runner.context for runner in self.runners) - self._deepest - 2
        prompt = (0,) * max(2, min(length, self.chunk + tokens))
        room.waiting.extend(GeneratedSequence(Wanted(prompt, self._deepest + 2)) for _ in range(room.batch))
        room.admit()
        room.waiting.clear()
        for sequence in room.active:
            sequence.cached = [len(prompt) - 1] * len(self.runners)
        room.active[0].cached = [max(0, len(prompt) - 1 - self.chunk)] * len(self.runners)

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
            return bool(self._growing(model, level))
        return kind == "commit" or bool(self._round.branching)

    def _begin_round(self) -> None:
        self.room.admit()
        self._round = this = _Round(self._chooser.choose())
        late = set()  # in the order of the room: not all is computed that their next tokens need
        drafting: dict[int, list[int]] = {}  # models, by the sequence's place in the room
        for model, runner in enumerate(self.runners):
            left, rows, behind = self.chunk, [], _BEHIND if model else 0
            for at, sequence in enumerate(self.room.active):
                if model and (
                    sequence.wanted.pooling or not (this.shape and sequence.length + len(this.shape) <= runner.context)
                ):
                    continue
                cached, wanted = sequence.cached[model], sequence.length - 1
                count = min(left, wanted - cached)
                if wanted - cached > behind and count:
                    new = sequence.tokens[cached : cached + count]
                    rows.append((sequence, RowInput.following(sequence.pages, new, cached)))
                    left -= count
                    cached += count
                if wanted - cached > behind:
                    late.add(at)
                if model:
                    drafting.setdefault(at, []).append(model)
            if rows:
                this.prefill[model] = rows
        for at, sequence in enumerate(self.room.active):
            if at not in late and not sequence.wanted.pooling:
                this.branching.append(self._branch(sequence, drafting.get(at, [])))

    def _branch(self, sequence: GeneratedSequence, drafts: list[int]) -> Branching:
        shape = self._round.shape[: sequence.left - 1] if drafts else ()
        # By place: a round that is begun again, in another process too, draws the same.
        chance = Sampled(np.random.default_rng((*sequence.wanted.seed, len(sequence.generated))))
        return Branching(sequence, shape, {model: [[0]] for model in drafts if shape}, chance)

    def _rows(self, kind: str, model: int, level: int) -> list[RowInput]:
        if kind == "prefill":
            return [row for _, row in self._round.prefill[model]]
        if kind == "verify":
            return [one.all_nodes() for one in self._round.branching]
        growing = self._growing(model, level)
        return [one.row(one.levels[model][level]) if level else one.first_row(model) for one in growing]

    def _growing(self, model: int, level: int) -> list[Branching]:
        return [one for one in self._round.branching if one.grows(model, level)]

    def _ended(self, kind: str, model: int, level: int, result: Any) -> None:
        if kind == "prefill":
            for at, (sequence, row) in enumerate(self._round.prefill[model]):
                count = len(row.tokens)
                if sequence.wanted.pooling:
                    sequence.pool(result[at, :count])
                sequence.cached[model] += count
        elif kind == "verify":
            self._round.logits = result
        else:
            for one, its in zip(self._growing(model, level), result, strict=True):
                one.grow(model, level, its)

    def _commit(self) -> None:
        """Verify the trees, keep what was taken, and let go of what has ended."""
        if self._round.branching:
            self._verify()
        for sequence in [one for one in self.room.active if one.finish is not None]:
            self.room.release(sequence)
            self.finished.append(sequence)

    def _verify(self) -> None:
        this = self._round
        most, best = this.logits.max(-1)
        finite, best = most.isfinite().tolist(), best.tolist()
        moves: list[list[tuple[list[int], int, int]]] = [[] for _ in self.runners]
        for at, one in enumerate(this.branching):
            sequence, nodes = one.sequence, len(one.tree.tokens)
            sequence.tainted |= not all(finite[at][:nodes])
            last = sequence.length - 1  # the column of the root
            path = self._take(one, this.logits[at, :nodes], best[at], finite[at])
            if path is None:
                continue
            for model in (0, *one.levels):
                kept = one.seen(model, path)
                sequence.cached[model] = last + 1 + len(kept)
                moves[model] += [
                    (sequence.pages, last + node, last + place) for place, node in enumerate(kept, 1) if node != place
                ]
        for runner, its in zip(self.runners, moves, strict=True):
            runner.cache.compact(its)
        for one in this.branching:
            if one.sequence.tainted:  # a tree that is not taken leaves what it was in columns that are masked
                self.room.wipe_rest(one.sequence)

    def _take(self, one: Branching, logits: Any, best: list[int], finite: list[bool]) -> list[int] | None:
        """Add to a sequence what is verified of its tree; the path there, None if that sequence has failed."""
        sequence = one.sequence
        try:
            tokens = one.verified(self._rule, logits, best, finite)
            path = one.path(tokens)
            taken = sequence.take(tokens, one.notes(tokens, path, logits), self._ends, self._decode)
        except NotFiniteError as error:
            sequence.fail(str(error))
            return None
        except MemoryError:
            raise
        except Exception as error:  # of a tokenizer, with tokens that it does not expect
            sequence.fail(f"{type(error).__name__}: {error}")
            return None
        self.taken[taken] += 1
        self._round.tokens += taken
        return path

    def _learn(self) -> None:
        """Note what the round says of its shape: nothing, if prompts were computed too."""
        this = self._round
        if this.branching:
            self._chooser.observe(this.shape, None if this.prefill else this.tokens, this.seconds)

"""The engine with the trained models, without a job around it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from megatron.fill.wings.llm.engine import Engine
from megatron.fill.wings.llm.models import load_language_model
from megatron.fill.wings.llm.passes import ModelRunner, RowInput
from megatron.fill.wings.llm.sequence import GeneratedSequence, Wanted
from megatron.fill.wings.llm.shapes import Shape
from megatron.fill.wings.llm.verify import Rule, traversal
from scripts.benchmarks.llm.trained import CONTEXT


@dataclass(slots=True)
class Reads:
    """What passes of one model have read.

    Attributes:
        weight_bytes: all of its weights in each batch of a pass.
        cache_bytes: the keys and values of each of a pass' sequences.
        products: multiplications with weights and with keys and values.
    """

    passes: int = 0
    weight_bytes: int = 0
    cache_bytes: int = 0
    products: int = 0


class CountingRunner(ModelRunner):
    """Counts what its passes read."""

    def __init__(self, model: Any, context: int) -> None:
        super().__init__(model, context)
        self.reads = Reads()
        self._weights = sum(one.numel() for one in model.parameters())
        if not model.config.tie_word_embeddings:  # a pass reads only a row of it for each token
            self._weights -= model.get_input_embeddings().weight.numel()
        self._size = model.dtype.itemsize

    def begin(self, rows: Sequence[RowInput], logits: bool = True) -> None:
        token_bytes = self.cache.token_bytes
        self.reads.passes += 1
        self.reads.weight_bytes += self._weights * self._size * len(self.groups(rows))
        for row in rows:
            columns = row.visible.shape[1]
            self.reads.cache_bytes += columns * token_bytes
            self.reads.products += len(row.tokens) * (self._weights + columns * token_bytes // self._size)
        super().begin(rows, logits)


@cache
def models(folder: Path) -> tuple[Any, Any, Any]:
    """The large model, the draft, and their tokenizer."""
    torch.set_num_threads(1)
    target, tokenizer = load_language_model(folder / "target")
    return target.eval(), load_language_model(folder / "draft")[0].eval(), tokenizer


def engine(
    folder: Path,
    shapes: Sequence[Shape],
    batch: int,
    rule: Rule = traversal,
    drafts: Sequence[Any] | None = None,
    runner: type[ModelRunner] = ModelRunner,
) -> Engine:
    """An engine with the draft, or with others; with no shape but the empty one it has none."""
    target, draft, tokenizer = models(folder)
    small = ([draft] if drafts is None else drafts) if any(shapes) else []
    runners = [runner(one, CONTEXT) for one in (target, *small)]
    return Engine(runners, tokenizer.decode, tokenizer.eos_ids, rule, shapes, batch, 128, None, time.thread_time)


def generate(made: Engine, wanted: Sequence[Wanted]) -> list[GeneratedSequence]:
    """All sequences, in the order in which they are wanted."""
    made.room.waiting.extend(GeneratedSequence(one, name) for name, one in enumerate(wanted))
    node = 0
    while not made.idle:
        node = made.run(node)
    done, made.finished = sorted(made.finished, key=lambda sequence: sequence.name), []
    return done

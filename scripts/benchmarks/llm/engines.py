"""The engine with the trained models, without a job around it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from megatron.fill.wings.llm.engine import Engine
from megatron.fill.wings.llm.models import load_language_model
from megatron.fill.wings.llm.passes import ModelRunner
from megatron.fill.wings.llm.sequence import GeneratedSequence, Wanted
from megatron.fill.wings.llm.shapes import Shape
from megatron.fill.wings.llm.verify import traversal
from scripts.benchmarks.llm.trained import CONTEXT


@cache
def models(folder: Path) -> tuple[Any, Any, Any]:
    """The large model, the draft, and their tokenizer."""
    torch.set_num_threads(1)
    target, tokenizer = load_language_model(folder / "target")
    return target.eval(), load_language_model(folder / "draft")[0].eval(), tokenizer


def engine(folder: Path, shapes: Sequence[Shape], batch: int) -> Engine:
    """An engine with the draft."""
    target, draft, tokenizer = models(folder)
    runners = [ModelRunner(one, CONTEXT) for one in (target, draft)]
    return Engine(runners, tokenizer.decode, tokenizer.eos_ids, traversal, shapes, batch, 128, None, time.thread_time)


def generate(made: Engine, wanted: Sequence[Wanted]) -> list[GeneratedSequence]:
    """All sequences, in the order in which they are wanted."""
    made.room.waiting.extend(GeneratedSequence(one, name) for name, one in enumerate(wanted))
    node = 0
    while not made.idle:
        node = made.run(node)
    done, made.finished = sorted(made.finished, key=lambda sequence: sequence.name), []
    return done

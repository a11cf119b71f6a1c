"""Are greedy answers those of ``transformers``, and a tree's logits those of its sequences alone?"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.fill.wings.llm.cache import pages_for
from megatron.fill.wings.llm.engine import Engine
from megatron.fill.wings.llm.models import load_language_model
from megatron.fill.wings.llm.passes import ModelRunner, RowInput
from megatron.fill.wings.llm.sequence import GeneratedSequence, Wanted
from megatron.fill.wings.llm.shapes import AUTO, Shape
from megatron.fill.wings.llm.verify import traversal
from scripts.benchmarks.llm.trained import CONTEXT, prompts

REQUESTS = 1000
MORE_SHAPES = ((2, 2, 1), (5, 1, 1, 1), (1, 1, 5, 1, 1, 1, 1, 1), (3, 1, 1, 1, 1, 1, 1, 1))
TREES = 50


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
    return Engine(runners, tokenizer.decode, tokenizer.eos_ids, traversal, shapes, batch, 128, time.thread_time)


def generate(made: Engine, wanted: Sequence[Wanted]) -> list[GeneratedSequence]:
    """All sequences, in the order in which they are wanted."""
    made.room.waiting.extend(GeneratedSequence(one, name) for name, one in enumerate(wanted))
    node = 0
    while not made.idle:
        node = made.run(node)
    done, made.finished = sorted(made.finished, key=lambda sequence: sequence.name), []
    return done


def measure(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Batches of 1 to 8, prompts and answers of mixed lengths, every shape; every third request has a stop."""
    target, _, tokenizer = models(folder)
    encoded = [tokenizer.encode(text) for text in prompts(REQUESTS)]
    lengths = [4 + at * 37 % 45 for at in range(REQUESTS)]
    expected = [_alone(target, tokenizer, prompt, most) for prompt, most in zip(encoded, lengths, strict=True)]
    stops: list[tuple[str, ...]] = [
        (text[len(text) // 2 : len(text) // 2 + 2],) if at % 3 == 0 and len(text) > 3 else ()
        for at, (_, text) in enumerate(expected)
    ]
    identical, groups = 0, [*AUTO, *MORE_SHAPES]
    for which, shape in enumerate(groups):
        mine = range(which, REQUESTS, len(groups))
        made = engine(folder, [shape], 1 + which % 8)
        wanted = [Wanted(tuple(encoded[at]), lengths[at], stop=stops[at]) for at in mine]
        for at, found in zip(mine, generate(made, wanted), strict=True):
            tokens, text = expected[at]
            if stops[at]:
                begun = tokens[: len(found.generated)] == found.generated
                same = begun and found.text == text[: text.index(stops[at][0])]
            else:
                same = (found.generated, found.text) == (tokens, text)
            identical += same
    error = tree_error(folder)
    over = over_cap(folder)
    summary = {"requests": REQUESTS, "identical": identical, "tree_logit_error": error, "kv_over_cap": over}
    return summary, {"stops": sum(map(bool, stops)), "shapes": [list(shape) for shape in groups], "trees": TREES}


def _alone(target: Any, tokenizer: Any, prompt: list[int], most: int) -> tuple[list[int], str]:
    """Tokens and text of plain greedy decoding by ``transformers``."""
    inputs = torch.tensor([prompt])
    ends = sorted(tokenizer.eos_ids)
    with torch.inference_mode():
        found = target.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=most,
            do_sample=False,
            eos_token_id=ends,
            pad_token_id=ends[0],
        )
    tokens = found[0, len(prompt) :].tolist()
    return tokens, tokenizer.decode(tokens[:-1] if tokens[-1] in ends else tokens)


def over_cap(folder: Path) -> int:
    """Bytes of keys and values over their cap, at most: a cap for few of eight sequences, which is halved midway."""
    tokenizer = models(folder)[2]
    texts = prompts(100)
    made = engine(folder, [(3, 1, 1)], 8)
    cap, worst = 4 * made.room.bytes_for_one(256), 0
    for half in (texts[:50], texts[50:]):
        made.room.limit(cap)
        made.room.peak_bytes = 0
        generate(made, [Wanted(tuple(tokenizer.encode(text)), 48) for text in half])
        worst = max(worst, made.room.peak_bytes - cap)
        cap //= 2
    return max(0, worst)


def tree_error(folder: Path) -> float:
    """The largest difference between the logits of a tree's node and those of its sequence alone."""
    target, _, tokenizer = models(folder)
    runner, source, worst = ModelRunner(target, CONTEXT), random.Random(1), 0.0
    pages = list(range(1, 1 + pages_for(CONTEXT)))
    runner.cache.resize(len(pages), {})
    for text in prompts(TREES):
        committed = tokenizer.encode(text)
        parents, tokens = [-1], [committed[-1]]
        for node in range(1, 20):
            parents.append(source.randrange(node))
            tokens.append(source.randrange(256))
        paths: list[list[int]] = []
        for node, parent in enumerate(parents):
            paths.append([*paths[parent], node] if parent >= 0 else [node])
        root = len(committed) - 1
        if root:
            runner.begin([RowInput.following(pages, committed[:-1], 0)], logits=False)
            runner.passes.run()
        visible = np.ones((20, root + 20), dtype=bool)
        visible[:, root:] = [[other in path for other in range(20)] for path in paths]
        runner.begin([RowInput(pages, tokens, range(root, root + 20), [root + len(p) - 1 for p in paths], visible)])
        runner.passes.run()
        for node, path in enumerate(paths):
            with torch.inference_mode():
                alone = target(torch.tensor([committed[:-1] + [tokens[at] for at in path]])).logits[0, -1]
            worst = max(worst, float((runner.passes.result[0, node] - alone).abs().max()))
    return worst

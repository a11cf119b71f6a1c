"""Tokens that a pass of the large model gives, and tokens a second, by the shape of the tree."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from megatron.fill.llm.sequence import Wanted
from megatron.fill.llm.shapes import AUTO, Shape
from megatron.fill.llm.verify import Rule, matching, multi_step, traversal
from scripts.benchmarks.llm.engines import engine, generate, models
from scripts.benchmarks.llm.trained import prompts

WIDTHS: dict[str, Shape] = {
    "1": (1, 1, 1, 1, 1, 1, 1, 1),
    "2": (1, 1, 2, 1, 1, 1, 1, 1),
    "3": (1, 1, 3, 1, 1, 1, 1, 1),
    "5": (1, 1, 5, 1, 1, 1, 1, 1),
    "tree": (3, 1, 1, 1, 1, 1, 1, 1),
}
RULES: dict[str, Rule] = {"matching": matching, "multi_step": multi_step, "traversal": traversal}
TEXTS, TOKENS = 40, 64
PAIRS, REQUESTS = 6, 64


def _wanted(folder: Path, count: int, temperature: float) -> list[Wanted]:
    tokenizer = models(folder)[2]
    encoded = [tokenizer.encode(text) for text in prompts(count, 32)]
    return [Wanted(tuple(tokens), TOKENS, temperature, seed=(1, at)) for at, tokens in enumerate(encoded)]


def _per_step(folder: Path, shape: Shape, temperature: float, rule: Rule, count: int = TEXTS) -> float:
    made = engine(folder, [shape], 4, rule)
    generate(made, _wanted(folder, count, temperature))
    return made.counts.tokens / made.counts.steps


def measure(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Greedy by width; sampled at temperature 1 by rule, with the same trees."""
    greedy = {width: round(_per_step(folder, shape, 0.0, traversal), 3) for width, shape in WIDTHS.items()}
    sampled = {
        name: {width: round(_per_step(folder, shape, 1.0, rule), 3) for width, shape in WIDTHS.items()}
        for name, rule in RULES.items()
    }
    more = {name: _per_step(folder, WIDTHS["3"], 1.0, RULES[name], 10 * TEXTS) for name in ("multi_step", "traversal")}
    summary = {"tokens_per_step": greedy, "traversal_gain": round(more["traversal"] / more["multi_step"] - 1, 4)}
    gain_from = {name: round(value, 4) for name, value in more.items()}
    return summary, {"sampled": sampled, "texts": TEXTS, "tokens": TOKENS, "gain_from": gain_from}


def measure_speed(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """With the shapes that the job chooses from, against none: pairs in turn, medians and bootstrap intervals."""
    speedup, intervals = {}, {}
    for batch in (1, 4, 8):
        ratios = [_pair(folder, batch, at % 2 == 0) for at in range(PAIRS)]
        speedup[str(batch)] = round(median(ratios), 3)
        intervals[str(batch)] = _interval(ratios)
    return {"speculative_speedup": speedup}, {"intervals": intervals, "pairs": PAIRS}


def _pair(folder: Path, batch: int, plain_first: bool) -> float:
    """How many times as many tokens a second."""
    seconds = {}
    for shapes in [[()], AUTO] if plain_first else [AUTO, [()]]:
        made, wanted = engine(folder, shapes, batch), _wanted(folder, REQUESTS, 0.0)
        begun = time.perf_counter()
        generate(made, wanted)
        seconds[len(shapes)] = (time.perf_counter() - begun) / made.counts.tokens
    return seconds[1] / seconds[len(AUTO)]


def _interval(values: Sequence[float]) -> list[float]:
    """95% of the medians of samples drawn from these with replacement."""
    random = np.random.default_rng(0)
    medians = [float(np.median(random.choice(values, len(values)))) for _ in range(2000)]
    return [round(float(np.percentile(medians, share)), 3) for share in (2.5, 97.5)]

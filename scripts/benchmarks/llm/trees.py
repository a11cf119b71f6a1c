"""Tokens that a step of the large model gives, what passes read for them, and tokens a second, by shape of tree."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from megatron.fill.wings.llm.engine import EngineCounts
from megatron.fill.wings.llm.sampling import Sampling
from megatron.fill.wings.llm.sequence import Wanted
from megatron.fill.wings.llm.shapes import AUTO, Shape
from megatron.fill.wings.llm.verify import Rule, matching, multi_step, traversal
from scripts.benchmarks.llm.engines import CountingRunner, engine, generate, models
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
    return [Wanted(tuple(tokens), TOKENS, Sampling(temperature), seed=(1, at)) for at, tokens in enumerate(encoded)]


def _counts(folder: Path, shape: Shape, temperature: float, rule: Rule, count: int = TEXTS) -> EngineCounts:
    made = engine(folder, [shape], 4, rule)
    generate(made, _wanted(folder, count, temperature))
    return made.counts


def _per_step(counts: EngineCounts) -> float:
    return round(counts.tokens / counts.steps, 4)


def _at_least(counts: EngineCounts) -> dict[str, float]:
    """The share of the steps that gave so many tokens or more."""
    most = max(counts.taken)
    return {
        str(tokens): round(sum(steps for taken, steps in counts.taken.items() if taken >= tokens) / counts.steps, 3)
        for tokens in range(1, most + 1)
    }


def measure(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Greedy by width; sampled at temperature 1 by rule, with the same trees."""
    runs = {"greedy": (0.0, traversal)} | {name: (1.0, rule) for name, rule in RULES.items()}
    found = {
        name: {width: _counts(folder, shape, temperature, rule) for width, shape in WIDTHS.items()}
        for name, (temperature, rule) in runs.items()
    }
    per_step = {name: {width: _per_step(one) for width, one in row.items()} for name, row in found.items()}
    at_least = {name: {width: _at_least(one) for width, one in row.items()} for name, row in found.items()}
    gain_from = {
        name: _per_step(_counts(folder, WIDTHS["3"], 1.0, RULES[name], 10 * TEXTS))
        for name in ("multi_step", "traversal")
    }
    gain = round(gain_from["traversal"] / gain_from["multi_step"] - 1, 4)
    summary = {"tokens_per_step": per_step.pop("greedy"), "traversal_gain": gain}
    details = {"sampled": per_step, "at_least": at_least, "texts": TEXTS, "tokens": TOKENS, "gain_from": gain_from}
    return summary, details


def measure_reads(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What passes of all models read for a generated token, by batch and tree (SpecInfer, section 2: its argument).

    A pass reads all weights once, and of each of its sequences the keys and values so far once, whatever the number of
    new tokens.  Counted, not timed.
    """
    rows = {}
    for batch in (1, 4):
        for name, shape in (("plain", ()), *WIDTHS.items()):
            made = engine(folder, [shape], batch, runner=CountingRunner)
            generate(made, _wanted(folder, TEXTS, 0.0))
            tokens = made.counts.tokens
            reads = [runner.reads for runner in made.runners if isinstance(runner, CountingRunner)]
            rows[f"batch {batch}, {name}"] = {
                "passes_of_large": round(reads[0].passes / tokens, 4),
                "weights_mb": round(sum(one.weight_bytes for one in reads) / tokens / 1e6, 4),
                "keys_values_mb": round(sum(one.cache_bytes for one in reads) / tokens / 1e6, 4),
                "multiplications_per_byte": round(
                    sum(one.products for one in reads) / sum(one.weight_bytes + one.cache_bytes for one in reads), 3
                ),
            }
    return {"reads": rows}, {}


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

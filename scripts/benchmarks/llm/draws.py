"""Are tokens distributed as the large model's own?  Exactly, for small vocabularies; and by a test of the engine."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import chisquare

from megatron.fill.wings.llm.sampling import Sampling, distribution
from megatron.fill.wings.llm.sequence import Wanted
from megatron.fill.wings.llm.speccheck import cases, check
from megatron.fill.wings.llm.verify import matching, multi_step, traversal
from scripts.benchmarks.llm.engines import engine, generate, models

DRAWS = 50_000
SAMPLING = Sampling(1.0, 0.95)
_RULES = {"matching": matching, "multi_step": multi_step, "traversal": traversal}


def measure(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The worst exact distance of any rule and case; the least p of the pairs of tokens that the engine draws."""
    distances = {name: max(check(rule, case).distance for case in cases()) for name, rule in _RULES.items()}
    target, _, tokenizer = models(folder)
    prompt = tokenizer.encode("def __init__(self, ")
    probable = {}
    for name, rule in _RULES.items():
        made = engine(folder, [(3, 1)], 64, rule)
        wanted = [Wanted(tuple(prompt), 2, SAMPLING, seed=(3, at)) for at in range(DRAWS)]
        found = Counter(tuple(one.generated) for one in generate(made, wanted))
        probable[name] = _test(target, prompt, found, tokenizer.eos_ids)
    summary = {"tv_worst": max(distances.values()), "chi_square_p_least": min(probable.values())}
    return summary, {"distances": distances, "p": probable, "draws": DRAWS}


def _test(target: Any, prompt: list[int], found: Counter[tuple[int, ...]], ends: frozenset[int]) -> float:
    """The p of a chi-square test; pairs that are expected less than five times count together."""
    expected: dict[tuple[int, ...], float] = {}
    first = _after(target, prompt)
    for token in np.flatnonzero(first):
        if int(token) in ends:
            expected[(int(token),)] = float(first[token])
            continue
        second = _after(target, [*prompt, int(token)])
        expected |= {(int(token), int(then)): float(first[token] * second[then]) for then in np.flatnonzero(second)}
    assert set(found) <= set(expected), "something was drawn that is impossible"
    often = [pair for pair, share in expected.items() if share * DRAWS >= 5]
    observed = [found[pair] for pair in often]
    wanted = [expected[pair] * DRAWS for pair in often]
    rest = DRAWS - sum(wanted)
    if rest >= 5:
        observed, wanted = [*observed, DRAWS - sum(observed)], [*wanted, rest]
    return float(chisquare(observed, np.array(wanted) * sum(observed) / sum(wanted)).pvalue)


def _after(target: Any, tokens: list[int]) -> np.ndarray:
    with torch.inference_mode():
        logits = target(torch.tensor([tokens])).logits[0, -1]
    return distribution(logits.numpy(), SAMPLING)

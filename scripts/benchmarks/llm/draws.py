"""Are tokens distributed as the large model's own?  Exactly, for small vocabularies; and by a test of the engine."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import chisquare

from megatron.fill.llm.sampling import distribution
from megatron.fill.llm.sequence import Wanted
from megatron.fill.llm.speccheck import cases, check
from megatron.fill.llm.verify import matching, multi_step, traversal
from scripts.benchmarks.llm.engines import engine, generate, models

DRAWS = 50_000
TOKENS = 3
TEMPERATURE, TOP_P = 1.0, 0.95
_RULES = {"matching": matching, "multi_step": multi_step, "traversal": traversal}


def measure(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The worst exact distance of any rule and case; the least p of the token triples that the engine draws.

    A triple is long enough for a tree of two levels to be verified at once.
    """
    distances = {name: max(check(rule, case).distance for case in cases()) for name, rule in _RULES.items()}
    target, _, tokenizer = models(folder)
    prompt = tokenizer.encode("def __init__(self, ")
    probable = {}
    for which, (name, rule) in enumerate(_RULES.items()):
        made = engine(folder, [(2, 2)], 64, rule)
        wanted = [Wanted(tuple(prompt), TOKENS, TEMPERATURE, TOP_P, seed=(which, at)) for at in range(DRAWS)]
        found = Counter(tuple(one.generated) for one in generate(made, wanted))
        probable[name] = _test(target, prompt, found, tokenizer.eos_ids)
    summary = {"tv_worst": max(distances.values()), "chi_square_p_least": min(probable.values())}
    return summary, {"distances": distances, "p": probable, "draws": DRAWS}


def _test(target: Any, prompt: list[int], found: Counter[tuple[int, ...]], ends: frozenset[int]) -> float:
    """The p of a chi-square test; what is expected less than five times counts together."""
    expected: dict[tuple[int, ...], float] = {}  # of whole draws, and of beginnings too rare to look at what follows

    def extend(drawn: tuple[int, ...], share: float) -> None:
        if len(drawn) == TOKENS or (drawn and drawn[-1] in ends) or share * DRAWS < 5:
            expected[drawn] = share
        else:
            after = _after(target, [*prompt, *drawn])
            for token in np.flatnonzero(after):
                extend((*drawn, int(token)), share * float(after[token]))

    extend((), 1.0)
    for drawn in found:
        assert any(drawn[:length] in expected for length in range(1, TOKENS + 1)), f"{drawn} is impossible"
    often = [drawn for drawn, share in expected.items() if share * DRAWS >= 5]
    observed = [found[drawn] for drawn in often]
    wanted = [expected[drawn] * DRAWS for drawn in often]
    rest = DRAWS - sum(wanted)
    if rest >= 5:
        observed, wanted = [*observed, DRAWS - sum(observed)], [*wanted, rest]
    return float(chisquare(observed, np.array(wanted) * sum(observed) / sum(wanted)).pvalue)


def _after(target: Any, tokens: list[int]) -> np.ndarray:
    with torch.inference_mode():
        logits = target(torch.tensor([tokens])).logits[0, -1]
    return distribution(logits.numpy(), TEMPERATURE, TOP_P)

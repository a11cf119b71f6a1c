"""Tokens a second with little memory for keys and values, and the sequences that are generated at once.

    python scripts/benchmarks/bench_llm.py --parts room_mixed,room_equal,room_limited,room_early --against FOLDER

The model has random weights, which are as fast as others.  Seconds are those of the process on its core, for others
have the rest of a busy machine.  ``FOLDER`` is a checkout of another version, whose engine generates the same in turn.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
PAIRS = 3
LAYERS, HIDDEN, HEADS, CONTEXT, VOCABULARY = 8, 256, 8, 2048, 512
# Prompt and new tokens of each request; sequences of the longest length that the memory has room for; batch; the ids of
# tokens that end a sequence, which are then sampled.
CASES: dict[str, tuple[list[tuple[int, int]], int | None, int, range]] = {
    "room_mixed": ([(1744, 256), *[(18, 32)] * 60], 4, 64, range(0)),
    "room_equal": ([(32, 96)] * 32, None, 8, range(0)),
    "room_limited": ([(32, 96)] * 32, 4, 64, range(0)),
    "room_early": ([(32, 480)] * 24, 4, 64, range(0, VOCABULARY, 48)),
}


def run(case: str) -> dict[str, float]:
    """Generate a case: tokens a second, and the sequences at once, on average over rounds and at most."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from megatron.fill.wings.llm.engine import Engine
    from megatron.fill.wings.llm.passes import ModelRunner
    from megatron.fill.wings.llm.sampling import Sampling
    from megatron.fill.wings.llm.sequence import GeneratedSequence, Wanted
    from megatron.fill.wings.llm.verify import traversal

    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    config = AutoConfig.for_model(
        "llama", vocab_size=VOCABULARY, intermediate_size=3 * HIDDEN, max_position_embeddings=CONTEXT, **shape
    )
    runner = ModelRunner(AutoModelForCausalLM.from_config(config).eval(), CONTEXT)
    requests, longest, batch, ends = CASES[case]
    most_bytes = None
    if longest is not None:  # a layer is held twice while there is room made
        token_bytes = 2 * LAYERS * HIDDEN * 4
        most_bytes = longest * token_bytes * (max(map(sum, requests)) + 32) * (LAYERS + 1) // LAYERS
    engine = Engine([runner], lambda *_, **__: "", ends, traversal, [()], batch, 128, most_bytes, time.thread_time)
    sampling = Sampling(1.0 if ends else 0.0)
    wanted = [
        Wanted((1 + at, *(1 + place % 400 for place in range(1, prompt))), new, sampling, (at,))
        for at, (prompt, new) in enumerate(requests)
    ]
    engine.room.waiting.extend(map(GeneratedSequence, wanted))
    node, at_once, begun = 0, [], time.thread_time()
    while not engine.idle:
        node = engine.run(node)
        if node:
            at_once.append(len(engine.room.active))
    seconds = time.thread_time() - begun
    return {
        "tokens_per_second": engine.counts.tokens / seconds,
        "at_once": sum(at_once) / len(at_once),
        "at_once_most": max(at_once),
    }


def measure(case: str, against: Path | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """A case by this checkout and by the other one in turn: medians."""
    checkouts = {"here": ROOT} | ({"against": against.resolve()} if against is not None else {})
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    for pair in range(PAIRS):
        for name in list(checkouts)[:: -1 if pair % 2 else 1]:
            runs[name].append(_run_elsewhere(checkouts[name], case))
            print(case, name, runs[name][-1], flush=True)
    found = {name: {key: round(median(one[key] for one in its), 1) for key in its[0]} for name, its in runs.items()}
    return {case: found}, {"runs": runs, "model": {"layers": LAYERS, "hidden": HIDDEN}}


def _run_elsewhere(checkout: Path, case: str) -> dict[str, float]:
    """Run a case in a process of its own, with the package of this checkout."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, case],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(checkout)},
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1])))

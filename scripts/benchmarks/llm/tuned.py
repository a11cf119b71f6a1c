"""Tokens that a pass of the large model gives with drafts that were tuned on its answers (SpecInfer, section 3)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from megatron.fill.sidetask.base import TaskContext
from megatron.fill.wings.llm import BatchJob, DraftTuning
from megatron.fill.wings.llm.models import load_language_model
from megatron.fill.wings.llm.sequence import Wanted
from megatron.fill.wings.llm.shapes import Shape
from megatron.fill.wings.llm.verify import traversal
from scripts.benchmarks.llm.engines import engine, generate, models
from scripts.benchmarks.llm.trained import prompts, write_requests

REQUESTS, TOKENS, STEPS = 1000, 64, 1500
TEXTS = 200  # held out
LINE: Shape = (1, 1, 1, 1, 1, 1, 1, 1)
FORK: Shape = (2, 1, 1, 1, 1, 1, 1, 1)  # one draft's tree of as many nodes as two drafts' lines
SHAPE = {"layers": 1, "hidden": 64, "heads": 4}
ANOTHER_SEED = 1000


def measure(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Greedy, on held-out prompts: the draft that was trained as a language model, tuned ones, and two of them."""
    work = folder / "tuned"
    work.mkdir(exist_ok=True)
    texts = prompts(REQUESTS, held_out=False)
    requests = write_requests(work / "requests.jsonl", texts, max_tokens=TOKENS, temperature=0)
    answers = _run(BatchJob(), work / "answers", folder / "target", requests, batch_sizes=[8], chunks=[128])
    told = {"requests": str(requests), "answers": str(answers / "answers.jsonl"), "shape": SHAPE, "steps": STEPS}
    boosted = _run(DraftTuning(), work / "boosted", folder / "target", **told, drafts=2)
    apart = _run(DraftTuning(), work / "apart", folder / "target", **told, seed=ANOTHER_SEED)
    one, two, other = (_draft(path) for path in (boosted / "drafts/0", boosted / "drafts/1", apart / "drafts/0"))
    compared: dict[str, tuple[list[Any], Shape]] = {
        "as trained": ([models(folder)[1]], LINE),
        "tuned": ([one], LINE),
        "tuned, two of each root": ([one], FORK),
        "two tuned apart": ([one, other], LINE),
        "two boosted": ([one, two], LINE),
    }
    found = {name: round(_per_step(folder, drafts, shape), 3) for name, (drafts, shape) in compared.items()}
    return {"tuned_tokens_per_step": found}, {"requests": REQUESTS, "steps": STEPS, "texts": TEXTS, "shape": SHAPE}


def _run(job: Any, where: Path, model: Path, *files: Path, **args: Any) -> Path:
    """Run a job alone, to its end; its folder."""
    where.mkdir(exist_ok=True)
    job.context = TaskContext(where.name, where)
    job.create(str(model), *map(str, files), **args)
    job.configure(job.configurations()[0])
    job.init()
    while True:
        try:
            job.run_next_step()
        except StopIteration:
            job.stop()
            return where
        if job.idle:
            time.sleep(0.01)


def _draft(path: Path) -> Any:
    return load_language_model(path)[0].eval()


def _per_step(folder: Path, drafts: list[Any], shape: Shape) -> float:
    tokenizer = models(folder)[2]
    made = engine(folder, [shape], 4, traversal, drafts)
    generate(made, [Wanted(tuple(tokenizer.encode(text)), TOKENS) for text in prompts(TEXTS, 32)])
    return made.counts.tokens / made.counts.steps

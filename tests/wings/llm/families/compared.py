"""A tiny model of a family: is what the engine generates with it what the library itself generates?

The model goes the way of a job: saved to a folder, loaded by ``load_language_model``, looked at by ``check_model``, run
by ``Engine``.  The truth is ``generate`` of ``transformers`` with a model of its own from the same folder, greedily and
one prompt at a time.
"""

from __future__ import annotations

import copy
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from megatron.fill.errors import TaskError
from tests.support.small_models import VOCABULARY, folder
from tests.wings.llm.families.tiny import CONTEXT, NotBuiltError, one_line, tiny_model

EQUAL, REFUSED, DIFFERS, NOT_BUILT = "equal", "refused", "differs", "not built"
_TIE = 1e-4  # of the spread of a position's logits
_ORDINARY = range(8, VOCABULARY)  # tokens that stand for nothing special in any of the families


@dataclass(slots=True)
class Outcome:
    """What became of a family.

    Attributes:
        status: one of ``EQUAL``, ``REFUSED``, ``DIFFERS`` and ``NOT_BUILT``.
        reason: in one line; nothing where all is equal.
        ways: what was found in each way.
        parameters: of the tiny model.
        ties: tokens that differ, as good as equal by their logits.
    """

    status: str
    reason: str = ""
    ways: dict[str, str] = field(default_factory=dict)
    parameters: int = 0
    ties: int = 0


@dataclass(frozen=True, slots=True)
class Way:
    """A way in which the engine generates.

    Attributes:
        prompts: how many tokens each of them has.
        new: tokens to generate for each.
        batch, chunk: of the engine.
        shape: of the token trees, with two drafts; () for no drafts.
    """

    prompts: tuple[int, ...]
    new: int
    batch: int = 1
    chunk: int = 64
    shape: tuple[int, ...] = ()


WAYS = {
    "alone": Way((7,), new=16),
    "batch of 8": Way((1, 3, 30, 12, 5, 21, 9, 16), new=6, batch=8),
    "chunks of 3": Way((40, 11), new=6, batch=2, chunk=3),
    "token trees": Way((2, 29), new=12, batch=2, shape=(2, 2, 1)),
    "long": Way((110,), new=12, chunk=32, shape=(1, 1)),  # beyond all windows of the tiny configs
}


def compare(family: str, said: Callable[[str], None] = lambda words: None) -> Outcome:
    """Make a tiny model of a family, and compare in all ways.

    Args:
        said: is told what is begun, for a process that may not come to its end.
    """
    said("building it")
    try:
        made, other = tiny_model(family), tiny_model(family, seed=1)
    except NotBuiltError as error:
        return Outcome(NOT_BUILT, error.why)
    size = sum(one.numel() for one in made.parameters())
    with tempfile.TemporaryDirectory() as path:
        try:
            saved = folder(Path(path) / family, made)
        except Exception as error:  # whatever the library's own code for saving raises
            return Outcome(NOT_BUILT, f"cannot be saved: {one_line(error)}", parameters=size)
        said("the engine's check of it")
        outcome = _compared(saved, other, said)
    outcome.reason = outcome.reason.replace(f"{path}/", "")
    outcome.parameters = size
    return outcome


def _compared(path: Path, other: Any, said: Callable[[str], None]) -> Outcome:
    from transformers import AutoModelForCausalLM

    from megatron.fill.wings.llm.models import load_language_model
    from megatron.fill.wings.llm.selfcheck import check_model

    try:
        model, _ = load_language_model(path, "float32")
        check_model(model)
    except TaskError as error:
        return Outcome(REFUSED, " ".join(str(error).split()))
    alone = AutoModelForCausalLM.from_pretrained(path, dtype="float32", local_files_only=True).eval()
    outcome = Outcome(EQUAL)
    for name, way in WAYS.items():
        said(name)
        try:
            found, outcome.ties = _difference(alone, [model, _near(model), other], way, outcome.ties)
        except Exception as error:  # of the engine, which had taken the model
            found = one_line(error)
        outcome.ways[name] = found or EQUAL
        if found and outcome.status == EQUAL:
            outcome.status, outcome.reason = DIFFERS, f"{name}: {found}"
    return outcome


def _near(model: Any) -> Any:
    """A draft that is right often, and not always."""
    import torch

    near = copy.deepcopy(model)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        for one in near.parameters():
            one.add_(0.02 * torch.randn_like(one))
    return near


def _difference(alone: Any, models: Sequence[Any], way: Way, ties: int) -> tuple[str, int]:
    """The first token that differs, in words, nothing for none; and the number of ties so far."""
    source = random.Random(5)
    prompts = [[source.choice(_ORDINARY) for _ in range(length)] for length in way.prompts]
    generated = engine_tokens(models if way.shape else models[:1], prompts, way)
    for number, (prompt, found) in enumerate(zip(prompts, generated, strict=True)):
        expected = library_tokens(alone, prompt, way.new)
        if found == expected:
            continue
        at = next((at for at, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]), None)
        if at is None or len(found) != len(expected):
            return f"prompt {number}: {len(found)} tokens instead of {len(expected)}", ties
        gap = max(_gaps(alone, prompt, tokens)[at] for tokens in (found, expected))
        later = max(_gaps(alone, prompt, found)[at:])
        if max(gap, later) > _TIE:
            words = f"prompt {number} of {len(prompt)} tokens: new token {at} is {found[at]} instead of {expected[at]}"
            return f"{words}, {max(gap, later):.2g} of the logits' spread apart", ties
        ties += 1
    return "", ties


def _gaps(model: Any, prompt: list[int], tokens: list[int]) -> list[float]:
    """How far each token is below the best one, by a plain pass: in units of the spread of that place's logits."""
    import torch

    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    taken = logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    gaps: list[float] = ((logits.max(-1).values - taken) / logits.std(-1)).tolist()
    return gaps


def library_tokens(model: Any, prompt: list[int], new: int) -> list[int]:
    """The tokens that ``generate`` of ``transformers`` adds to a prompt, without any ending."""
    import torch
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig(pad_token_id=0)  # a family's own may hold beams, penalties, endings
    ids = torch.tensor([prompt])
    with torch.no_grad():
        found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
    tokens: list[int] = found[0, len(prompt) :].tolist()
    return tokens


def engine_tokens(models: Sequence[Any], prompts: list[list[int]], way: Way) -> list[list[int]]:
    """The tokens that the engine adds to each prompt, without any ending."""
    from megatron.fill.wings.llm import verify
    from megatron.fill.wings.llm.attention import context_of
    from megatron.fill.wings.llm.engine import Engine
    from megatron.fill.wings.llm.passes import ModelRunner, token_rows
    from megatron.fill.wings.llm.sequence import GeneratedSequence, Wanted

    size = token_rows(models[0])
    runners = [ModelRunner(one, min(context_of(one).tokens, CONTEXT), 2, size) for one in models]
    engine = Engine(runners, str, (), verify.traversal, [way.shape], way.batch, way.chunk, count().__next__)
    engine.room.waiting.extend(
        GeneratedSequence(Wanted(tuple(prompt), way.new), name) for name, prompt in enumerate(prompts)
    )
    try:
        node = 0
        while not engine.idle:
            node = engine.run(node)
    finally:
        for runner in runners:
            runner.passes.remove()
    ended = sorted(engine.finished, key=lambda sequence: sequence.name)
    for sequence in ended:
        if sequence.finish == "error":
            raise TaskError(sequence.text)
    return [sequence.generated for sequence in ended]

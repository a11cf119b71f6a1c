"""Is what the engine computes with a model what the model itself computes?  Looked into whenever one is loaded.

Plain forward passes over whole sequences are the truth.  They are compared with the ways in which the engine computes
the same logits: a batch of mixed lengths, prompts in chunks, tokens that follow kept keys and values, a token tree, and
all of that beyond the lengths at which the model's config says that something changes.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from megatron.fill.errors import TaskError
from megatron.fill.wings.llm.attention import context_of, marks, text_config
from megatron.fill.wings.llm.branching import tree_row
from megatron.fill.wings.llm.cache import pages_for
from megatron.fill.wings.llm.passes import ModelRunner, RowInput, decoder_layers
from megatron.fill.wings.llm.tree import TokenTree

logger = logging.getLogger("pipefill.models")

# Of the spread of a position's logits: what rounding may change.
_TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-6, torch.float16: 0.05, torch.bfloat16: 0.2}
_ODD_POSITIONS = 0.34  # in half precision, of those compared: an expert that is chosen by a hair changes a whole token
_COPIED = 4e6  # parameters of a model in half precision that is checked in single precision, which shows more
_LONG = {"cpu": 5e10, "cuda": 1e14}  # products of a weight and a token that a check of long sequences may take
_LONG_LOGITS = 1 << 28  # bytes
_LENGTH, _SHARED = 13, 5  # tokens of the short sequences; that they have in common
_TAIL = 8  # tokens of the long ones that they have not in common
_LATER = "tokens that come later"


@dataclass(frozen=True, slots=True)
class _Found:
    """The logits that a way of computing gave."""

    way: str
    sequence: int  # number of the sequence
    first: int  # place of the first token
    logits: torch.Tensor  # ``[tokens, vocabulary]``


def check_model(model: Any, generates: bool = True) -> None:
    """Compare what the engine would compute with what the model computes.

    It takes passes over about 100 tokens, and if the model is small enough one over the longest length at which the
    config says that something changes.

    Args:
        model: in evaluation mode, on its device; it is left as it was.
        generates: else it is only given whole sequences, in batches: no keys and values are kept, and there are no
            chunks and no trees.

    Raises:
        TaskError: they differ, or the model cannot be run so: naming what differs and by how much.
    """
    name = type(model).__name__
    try:
        with torch.inference_mode():
            (_check if generates else _check_whole)(_precise(model))
    except TaskError:
        raise
    except Exception as error:  # whatever a model's code does with inputs that it does not expect
        said = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        how = "with keys and values of several sequences in pages" if generates else "over several sequences"
        raise TaskError(f"{name} cannot be run {how}: {said}") from error


def check_finite(model: Any) -> None:
    """Refuse a model that could answer nothing, as weights of NaN do, or numbers too large for its type.

    Raises:
        TaskError: it gives no finite logits at all.
    """
    sequences = torch.tensor(_sequences(model, min(_LENGTH, context_of(model).tokens)), device=model.device)
    with torch.inference_mode():
        most = model(input_ids=sequences, use_cache=False).logits.amax(-1)
    if not most.isfinite().any():
        raise TaskError(
            f"the logits of {type(model).__name__} are not finite numbers (NaN or infinite) for any of "
            f"{most.numel()} tokens; expected finite weights, and a dtype in which they do not overflow"
        )


def _precise(model: Any) -> Any:
    small = sum(parameter.numel() for parameter in model.parameters()) <= _COPIED
    if not small or model.dtype not in (torch.float16, torch.bfloat16):
        return model
    return copy.deepcopy(model).float()


def _check(model: Any) -> None:
    context = context_of(model).tokens
    runner = ModelRunner(model, context, min(2, len(decoder_layers(model))))
    try:
        sequences = _sequences(model, min(_LENGTH, context))
        truth = _truth(model, sequences)
        tables = _tables(runner, [3 * len(one) for one in sequences])
        _compare(model, _ways(runner, sequences, tables), truth)
        if (longest := _longest(model, context)) is not None:
            sequences = _long_sequences(model, longest)
            _compare(model, _long_ways(runner, sequences), _truth(model, sequences))
    finally:
        runner.passes.remove()


def _check_whole(model: Any) -> None:
    """Check that whole sequences have the same logits in a batch."""
    sequences = _sequences(model, min(_LENGTH, context_of(model).tokens))
    truth = _truth(model, sequences)
    together = model(input_ids=torch.tensor(sequences, device=model.device), use_cache=False).logits
    _compare(model, [_Found("a batch", at, 0, logits) for at, logits in enumerate(together)], truth)


def _truth(model: Any, sequences: list[list[int]]) -> list[torch.Tensor]:
    """The logits of each sequence alone, ``[tokens, vocabulary]``.

    Raises:
        TaskError: those of the tokens that the sequences share are not the same.
    """
    ids = [torch.tensor([tokens], device=model.device) for tokens in sequences]
    truth = [model(input_ids=one, use_cache=False).logits[0] for one in ids]
    shared = truth[0][: min(_SHARED, len(sequences[0]))]
    _compare(model, [_Found(_LATER, at, 0, shared) for at in range(1, len(truth))], truth)
    return truth


def _sequences(model: Any, length: int) -> list[list[int]]:
    """Three sequences that begin alike, of tokens that stand for nothing special."""
    rows = model.get_input_embeddings().weight.shape[0]
    special = {value for value in _numbers(model.config.to_dict()) if 0 <= value < rows}
    usual = [token for token in range(min(rows, 5000)) if token not in special] or [0]
    random = np.random.default_rng(7)
    shared = random.choice(usual, min(_SHARED, length)).tolist()
    return [[*shared, *random.choice(usual, length - len(shared)).tolist()] for _ in range(3)]


def _numbers(config: Any, name: str = "") -> Iterator[int]:
    """Every id of a token that a config names."""
    if isinstance(config, dict):
        for key, value in config.items():
            yield from _numbers(value, str(key))
    elif isinstance(config, list):
        for value in config:
            yield from _numbers(value, name)
    elif type(config) is int and name.endswith(("token_id", "token_index", "token_ids")):
        yield config


def _tables(runner: ModelRunner, columns: Sequence[int]) -> list[list[int]]:
    """The pages of sequences that have so many columns; in an order in which they are copied for each layer."""
    ends = list(accumulate(map(pages_for, columns)))
    runner.cache.resize(ends[-1], {})
    return [list(range(end, begin, -1)) for begin, end in pairwise([0, *ends])]


def _passed(runner: ModelRunner, rows: list[RowInput]) -> torch.Tensor:
    """The logits of a pass, ``[rows, queries, vocabulary]``."""
    runner.begin(rows)
    for piece in range(runner.passes.pieces):
        if runner.passes.run() != (piece + 1 == runner.passes.pieces):
            raise TaskError(
                f"{type(runner.model).__name__} does not run its {text_config(runner.model).num_hidden_layers} layers "
                "once each and in order; expected that, since passes are cut between layers"
            )
    result: torch.Tensor = runner.passes.result
    return result


def _ways(runner: ModelRunner, sequences: list[list[int]], tables: Sequence[list[int]]) -> Iterator[_Found]:
    length, shared = len(sequences[0]), min(_SHARED, len(sequences[0]))
    ends = [length // 2 + 1, max(1, shared - 2), max(1, length - 2)]
    first = [
        RowInput.following(pages, tokens[:end], 0) for pages, tokens, end in zip(tables, sequences, ends, strict=True)
    ]
    logits = _passed(runner, first)
    for at, end in enumerate(ends):
        yield _Found("a batch of mixed lengths", at, 0, logits[at, :end])
    # The first sequence goes on in chunks, the second with the next token, the third with its rest.
    until = [min(end + count, length) for end, count in zip(ends, (2, 1, length), strict=True)]
    going_on = [at for at in range(3) if until[at] > ends[at]]
    if going_on:
        logits = _passed(
            runner, [RowInput.following(tables[at], sequences[at][ends[at] : until[at]], ends[at]) for at in going_on]
        )
        for row, at in enumerate(going_on):
            new = logits[row, : until[at] - ends[at]]
            yield _Found("tokens after keys and values that were kept", at, ends[at], new)
    if length > shared:
        yield from _tree(runner, sequences, tables, shared - 1, "a token tree")


def _tree(
    runner: ModelRunner, sequences: list[list[int]], tables: Sequence[list[int]], root: int, way: str
) -> Iterator[_Found]:
    """All sequences as branches of one tree below their last common token, the root, in the second one's pages."""
    tree, paths = TokenTree(), [[0] for _ in sequences]
    for level in range(root + 1, len(sequences[0])):  # by depth, as drafts grow one
        for path, sequence in zip(paths, sequences, strict=True):
            path.append(tree.add(path[-1], sequence[level], np.empty(0)))
    row = tree_row(tree, list(range(len(tree.tokens))), tables[1], root, sequences[0][root])
    # Beside another row, so that the batch has sequences of several lengths here too.
    logits = _passed(runner, [RowInput.following(tables[0], sequences[0][:1], 0), row])[1]
    for number, path in enumerate(paths):
        yield _Found(way, number, root, logits[path])


def _longest(model: Any, context: int) -> int | None:
    """The tokens of the longest sequence that is worth a look and short enough for one; None for none."""
    weights = sum(parameter.numel() for parameter in model.base_model.parameters())
    vocabulary = int(getattr(text_config(model), "vocab_size", 0) or 0)
    kind = str(model.device).partition(":")[0]
    allowed = [
        mark
        for mark in marks(model)
        if 2 * mark * weights <= _LONG[kind] and 4 * mark * vocabulary <= _LONG_LOGITS and mark + _LENGTH <= context
    ]
    if left := [mark for mark in marks(model) if mark not in allowed]:
        logger.info("sequences of more than %d tokens were not compared: that would take long", min(left))
    return max(allowed) + _LENGTH if allowed else None


def _long_sequences(model: Any, length: int) -> list[list[int]]:
    """Three sequences that are longer than what the config has a number for, alike but for their ends."""
    begin = _sequences(model, _LENGTH)
    usual = sorted({token for one in begin for token in one})
    shared = np.random.default_rng(11).choice(usual, length - _TAIL).tolist()
    return [[*shared, *one[-_TAIL:]] for one in begin]


def _long_ways(runner: ModelRunner, sequences: list[list[int]]) -> Iterator[_Found]:
    """The logits of their common beginning in chunks, and of their ends as a tree."""
    length = len(sequences[0])
    tables = _tables(runner, [1, length + 3 * _TAIL])
    chunk = max(1, min(256, length // 3))  # the first one ends before whatever changes
    for first in range(0, length - _TAIL, chunk):
        part = sequences[1][first : min(first + chunk, length - _TAIL)]
        found = _passed(runner, [RowInput.following(tables[1], part, first)])[0]
        yield _Found(f"a sequence of {length} tokens in chunks", 1, first, found)
    yield from _tree(runner, sequences, tables, length - _TAIL - 1, f"a token tree after {length - _TAIL} tokens")


def _compare(model: Any, found: Iterator[_Found] | list[_Found], truth: list[torch.Tensor]) -> None:
    """Refuse the model if what was found is not the truth.

    Raises:
        TaskError: naming the way, and the largest difference.
    """
    allowed = _TOLERANCES[model.dtype]
    for one in found:
        wanted = truth[one.sequence][one.first : one.first + len(one.logits)].float()
        off = _differences(one.logits.float(), wanted)
        odd = float((off > allowed).float().mean())
        if odd > (_ODD_POSITIONS if model.dtype in (torch.float16, torch.bfloat16) else 0.0):
            name, worst = type(model).__name__, f"{float(off.max()):.2g} of their spread"
            if one.way == _LATER:
                raise TaskError(
                    f"{name} is no causal model: its logits change with {one.way}, by {worst}; expected a decoder, not "
                    "an encoder"
                )
            raise TaskError(
                f"{name} cannot be run in batches of sequences with kept keys and values: with {one.way} its logits "
                f"differ from those of the model alone by {worst}; expected at most {allowed:g}"
            )


def _differences(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Error of each position's logits, ``[positions]``: root mean square, in units of their spread."""
    sure = torch.isfinite(wanted)
    same = sure == torch.isfinite(found)
    difference = torch.where(sure & same, found - wanted, 0.0)
    spread = torch.where(sure, wanted, 0.0).std(-1, correction=0).clamp_min(1e-12)
    off = difference.square().mean(-1).sqrt() / spread
    return torch.where(same.all(-1), off, float("inf"))

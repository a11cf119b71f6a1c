"""The validation samples of a Megatron training, as its own data set has them.

Megatron splits a data set by documents, repeats those of a split for as many epochs as all evaluations need, shuffles
them with the training's seed, cuts their tokens into samples of the sequence's length, and shuffles these.
"""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path

import numpy as np

from megatron.fill.errors import TaskError

_MAGIC = b"MMIDIDX\x00\x00"
_TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


class IndexedTokens:
    """The documents of an indexed data set, ``PREFIX.idx`` and ``PREFIX.bin``; TaskError if it is none."""

    def __init__(self, prefix: Path) -> None:
        try:
            index = Path(f"{prefix}.idx").read_bytes()
            if not index.startswith(_MAGIC):
                raise TaskError(f"data {prefix}.idx is not a Megatron index: expected one of preprocess_data.py")
            kind = _TYPES.get(index[17])
            if kind is None:
                raise TaskError(f"data {prefix}.idx has tokens of type {index[17]}: expected whole numbers")
            sequences, documents = np.frombuffer(index, np.int64, 2, 18).tolist()
            lengths = np.frombuffer(index, np.int32, sequences, 34)
            bounds = np.frombuffer(index, np.int64, documents, 34 + 12 * sequences)
            self._tokens = np.memmap(f"{prefix}.bin", kind, "r")
        except (OSError, ValueError, IndexError) as error:
            raise TaskError(f"data {prefix} cannot be read: {error}; expected PREFIX.idx and PREFIX.bin") from error
        self._starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])[bounds]
        self.documents = documents - 1  # number of documents

    def document(self, number: int) -> np.ndarray:
        return self._tokens[self._starts[number] : self._starts[number + 1]]


def validation_samples(args: Namespace, count: int | None = None) -> np.ndarray:
    """The first samples of the validation split, ``[samples, sequence length + 1]`` of int64.

    Args:
        args: the training's arguments.
        count: number of samples; None for those of the training's first evaluation.  Fewer where it has no more.

    Raises:
        TaskError: the training has no such data set, or its split has no sample.
    """
    prefixes = args.data_path or []
    if len(prefixes) != 1:
        raise TaskError(f"the training's --data-path is {' '.join(prefixes) or 'not given'}: expected one prefix")
    data, length = IndexedTokens(Path(prefixes[0])), args.seq_length
    documents = np.arange(*_validation_part(args.split or "969,30,1", data.documents), dtype=np.int32)
    tokens = sum(len(data.document(number)) for number in documents.tolist())
    if tokens <= length:
        raise TaskError(f"the validation split of {prefixes[0]} has {tokens} tokens: expected more than {length}")
    batch = getattr(args, "eval_global_batch_size", None) or args.global_batch_size
    wanted = 0 if getattr(args, "full_validation", False) else _evaluations(args) * args.eval_iters * batch
    epochs = max(1, -(-(wanted * length + 1) // tokens))
    # The last epoch is shuffled apart if little of it is wanted.
    before_last = ((epochs - 1) * tokens - 1) // length
    apart = epochs > 1 and wanted - before_last < int(0.8 * ((tokens - 1) // length))
    random = np.random.RandomState(args.seed)
    parts = [np.tile(documents, epochs - 1), documents.copy()] if apart else [np.tile(documents, epochs)]
    for part in parts:
        random.shuffle(part)
    samples = (epochs * tokens - 1) // length
    orders = [np.arange(before_last), np.arange(before_last, samples)] if apart else [np.arange(samples)]
    for order in orders:
        random.shuffle(order)
    first = np.concatenate(orders)[: count or args.eval_iters * batch or samples]
    order = np.concatenate(parts)
    ends = np.cumsum([len(data.document(number)) for number in order.tolist()])
    return np.stack([_tokens(data, order, ends, at * length, length + 1) for at in first.tolist()])


def _tokens(data: IndexedTokens, order: np.ndarray, ends: np.ndarray, start: int, count: int) -> np.ndarray:
    """Tokens of documents that follow each other in this order.

    Args:
        ends: each document's end in that stream.
    """
    parts: list[np.ndarray] = []
    at = int(np.searchsorted(ends, start, side="right"))
    while count:
        document = data.document(int(order[at]))
        part = document[start - (int(ends[at]) - len(document)) :][:count].astype(np.int64)
        parts.append(part)
        start, count, at = start + len(part), count - len(part), at + 1
    return np.concatenate(parts)


def _evaluations(args: Namespace) -> int:
    if args.skip_train:
        return 1
    skipped = (getattr(args, "start_eval_at_iter", None) or 0) // args.eval_interval
    return max(0, args.train_iters // args.eval_interval + 1 - skipped)


def _validation_part(split: str, documents: int) -> tuple[int, int]:
    """The first document of the validation split, and the one after its last."""
    shares = [float(share) for share in re.findall(r"[.0-9]+", split)] + [0.0] * 3
    total = sum(shares[:3])
    return round(shares[0] / total * documents), round((shares[0] + shares[1]) / total * documents)

"""The validation samples of a Megatron training, as its own data set has them.

Megatron splits a data set by documents, shuffles those of a split with the training's seed, cuts their tokens into
samples of the sequence's length, and shuffles these.  The same is done here for one epoch.
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
    """The documents of an indexed data set: ``PREFIX.idx`` and ``PREFIX.bin``.

    Attributes:
        documents: how many there are.

    Raises:
        TaskError: there is none, or it is something else.
    """

    def __init__(self, prefix: Path) -> None:
        try:
            index = Path(f"{prefix}.idx").read_bytes()
            if not index.startswith(_MAGIC):
                raise TaskError(f"data {prefix}.idx is no index of Megatron's: expected one of preprocess_data.py")
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
        self.documents = documents - 1

    def document(self, number: int) -> np.ndarray:
        return self._tokens[self._starts[number] : self._starts[number + 1]]


def validation_samples(args: Namespace, prefix: Path | None = None) -> np.ndarray:
    """All samples of the validation split, ``[samples, sequence length + 1]`` of int64, in the order of an epoch.

    Args:
        args: of the training.
        prefix: of another data set, whose documents are split likewise; None for the training's own.

    Raises:
        TaskError: the training has no such data set, or its split has no sample.
    """
    own = args.data_path or []
    if prefix is None:
        if len(own) != 1:
            raise TaskError(
                f"the training's --data-path is {' '.join(own) or 'not given'}: expected one prefix, or data"
            )
        prefix = Path(own[0])
    data = IndexedTokens(prefix)
    first, end = _validation_part(args.split or "969,30,1", data.documents)
    random = np.random.RandomState(args.seed)
    documents = np.arange(first, end, dtype=np.int32)
    random.shuffle(documents)
    tokens = np.concatenate([data.document(int(number)) for number in documents] or [np.empty(0)]).astype(np.int64)
    length = args.seq_length
    count = (len(tokens) - 1) // length
    if count < 1:
        raise TaskError(f"the validation split of {prefix} has {len(tokens)} tokens: expected more than {length}")
    order = np.arange(count, dtype=np.uint32)
    random.shuffle(order)
    return np.stack([tokens[at * length : (at + 1) * length + 1] for at in order])


def _validation_part(split: str, documents: int) -> tuple[int, int]:
    """The first document of the validation split, and the one after its last."""
    shares = [float(share) for share in re.findall(r"[.0-9]+", split)] + [0.0] * 3
    total = sum(shares[:3])
    return round(shares[0] / total * documents), round((shares[0] + shares[1]) / total * documents)

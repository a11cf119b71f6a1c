"""Where the samples of a job come from: a data set with a length, or anything that can be iterated over again."""

from __future__ import annotations

import itertools
import pkgutil
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from megatron.fill.errors import TaskError
from megatron.fill.sidetask.models import find_workload


def load_object(argument: str, path: object) -> Any:
    """What ``module:name`` names.

    Raises:
        ValueError: naming the argument, if there is no such thing.
    """
    if not isinstance(path, str) or not all(path.partition(":")):
        raise ValueError(f"{argument} is {path!r}: expected module:name")
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{argument} is {path!r}: {error}") from error


class Samples:
    """A data source and how it is read.

    A sample is ``(inputs, target)``, or just ``inputs`` where no target is needed; ``inputs`` is a tensor, a mapping of
    the model's keywords, or a list of its arguments.

    Args:
        source: has ``__len__`` and ``__getitem__``, or can be iterated over again and again.

    Raises:
        ValueError: it is neither, or empty.
    """

    def __init__(self, source: Any) -> None:
        self.source = source
        self.length: int | None = None
        if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
            self.length = len(source)
            if self.length == 0:
                raise ValueError("data has 0 samples: expected at least 1")
        elif not hasattr(source, "__iter__"):
            raise ValueError(f"data is a {type(source).__name__}: expected a length and indices, or an iterable")
        elif iter(source) is source:
            raise ValueError(f"data is a {type(source).__name__}, which can be read only once: expected an iterable")

    def get(self, index: int) -> Any:
        """One sample of a source with a length.

        Raises:
            TaskError: the source ends before its length.
        """
        try:
            return self.source[index]
        except IndexError as error:
            raise TaskError(f"data ended early: no sample {index}, although its length is {self.length}") from error

    def epoch(self, seed: int | None, epoch: int, skip: int = 0) -> Iterator[Any]:
        """The samples of one epoch from number ``skip`` on.

        Those of a source with a length are shuffled by ``seed`` and ``epoch``, unless the seed is None.
        """
        if self.length is None:
            return itertools.islice(iter(self.source), skip, None)
        return (self.get(index) for index in self.order(seed, epoch)[skip:])

    def order(self, seed: int | None, epoch: int) -> Sequence[int]:
        """The indices of a source with a length, in the order of this epoch."""
        assert self.length is not None
        if seed is None:
            return range(self.length)
        shuffled: list[int] = np.random.default_rng((seed, epoch)).permutation(self.length).tolist()
        return shuffled

    def first(self, count: int) -> list[Any]:
        """``count`` samples to try a model with: the first ones, again and again if there are not as many.

        Raises:
            ValueError: there is none.
        """
        found = list(itertools.islice(self.epoch(None, 0), count))
        if not found:
            raise ValueError("data has 0 samples: expected at least 1")
        return [found[i % len(found)] for i in range(count)]


def inputs_and_target(sample: Any) -> tuple[Any, Any]:
    """A tuple of two is ``(inputs, target)``; anything else is inputs."""
    return sample if isinstance(sample, tuple) and len(sample) == 2 else (sample, None)


def collate(values: list[Any], device: str) -> Any:
    """A batch on the device, stacked as ``torch.utils.data`` does it."""
    from torch.utils import _pytree as pytree
    from torch.utils.data import default_collate

    batch = default_collate(values)
    return pytree.tree_map(lambda x: x.to(device) if hasattr(x, "to") else x, batch)


class RandomData:
    """Samples for a workload of ``models``: random images or texts with random labels; the same for the same seed."""

    def __init__(
        self, name: str, size: str = "full", samples: int = 256, length: int | None = None, seed: int = 0, **fields: Any
    ) -> None:
        """``length``: tokens of a text, or pixels along a side; ``fields``: as for ``build_model``."""
        workload = find_workload(name)
        merged = workload.fields(size, fields)
        self._text = workload.is_text
        self._classes = int(merged.get("num_labels", 2) if self._text else merged["num_classes"])
        self._tokens = int(merged.get("vocab_size", 30_522))
        self._length = length or workload.length(size)
        self._samples, self._seed = samples, seed

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[Any, int]:
        import torch

        generator = np.random.default_rng((self._seed, index))
        label = int(generator.integers(self._classes))
        if not self._text:
            return torch.from_numpy(generator.standard_normal((3, self._length, self._length), np.float32)), label
        tokens = torch.from_numpy(generator.integers(4, self._tokens, self._length))
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, label


def classification_loss(output: Any, target: Any) -> Any:
    """Cross entropy of a model's logits; what the workloads of ``models`` are trained with."""
    from torch.nn.functional import cross_entropy

    return cross_entropy(getattr(output, "logits", output), target)

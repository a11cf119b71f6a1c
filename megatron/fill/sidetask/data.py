"""The samples of a job: from a data set with a length, or from an iterable that can be read repeatedly."""

from __future__ import annotations

import itertools
import pkgutil
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from megatron.fill.errors import TaskError
from megatron.fill.sidetask.models import find_workload, input_length, model_fields


def load_object(argument: str, path: object) -> Any:
    """Import the ``module:name`` that a task's argument names; ValueError if it does not exist or has another form."""
    if not isinstance(path, str) or not all(path.partition(":")):
        raise ValueError(f"{argument} is {path!r}: expected module:name")
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{argument} is {path!r}: {error}") from error


class Samples:
    """A reader of a data source.

    A sample is ``(inputs, target)``, or just ``inputs`` if no target is needed; ``inputs`` is a tensor, a mapping of
    the model's keywords, or a list of its arguments.

    Args:
        source: object with ``__len__`` and ``__getitem__``, or an iterable that can be read repeatedly.

    Raises:
        ValueError: the source is neither, or is empty.
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
        """A sample of a source with a length; TaskError if the source ends before its length."""
        try:
            return self.source[index]
        except IndexError as error:
            raise TaskError(f"data ended early: no sample {index}, although its length is {self.length}") from error

    def epoch(self, seed: int | None, epoch: int, skip: int = 0) -> Iterator[Any]:
        """Iterate over the samples of an epoch, without the first ``skip``.

        Samples of a source with a length are shuffled by ``seed`` and ``epoch``, unless the seed is None.
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
        """The first ``count`` samples, repeated if there are fewer; ValueError if there are none."""
        found = list(itertools.islice(self.epoch(None, 0), count))
        if not found:
            raise ValueError("data has 0 samples: expected at least 1")
        return [found[i % len(found)] for i in range(count)]


def inputs_and_target(sample: Any) -> tuple[Any, Any]:
    """Split a sample into inputs and target: a tuple of two is ``(inputs, target)``, anything else is inputs."""
    return sample if isinstance(sample, tuple) and len(sample) == 2 else (sample, None)


def collate(values: list[Any], device: str) -> Any:
    """Stack values into a batch on the device, as ``torch.utils.data`` does."""
    from torch.utils import _pytree as pytree
    from torch.utils.data import default_collate

    batch = default_collate(values)
    return pytree.tree_map(lambda x: x.to(device) if hasattr(x, "to") else x, batch)


class RandomData:
    """Samples for a model of ``models.MODELS``: random images or texts with random labels, determined by the seed."""

    def __init__(
        self, name: str, size: str = "full", samples: int = 256, length: int | None = None, seed: int = 0, **fields: Any
    ) -> None:
        """Create a data set for a model; ValueError if there is none of that name, or no such size.

        Args:
            size: ``full`` or ``tiny``, the size of the model.
            length: tokens of a text, or pixels along a side of an image; None for the model's own.
            fields: fields of the model's configuration, as for ``build_model``.
        """
        model = find_workload(name)
        merged = model_fields(model, size, fields)
        self._text = model.is_text
        self._classes = int(merged.get("num_labels", 2) if self._text else merged["num_classes"])
        self._tokens = int(merged.get("vocab_size", 30_522))
        self._length = length or input_length(model, size)
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
    """Cross entropy of a model's logits, the loss for ``models.MODELS``."""
    from torch.nn.functional import cross_entropy

    return cross_entropy(getattr(output, "logits", output), target)

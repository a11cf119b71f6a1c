"""From a model's logits to the probabilities that a token is drawn with.

The order is that of vLLM: bias, penalties of repetition, frequency and presence; then temperature, ``min_p``, ``top_k``
and ``top_p``.  OpenAI's fields are a part of these, for which the order makes no difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of one sequence; the defaults take the most probable token."""

    temperature: float = 0.0  # 0 takes the most probable token
    top_p: float = 1.0  # the most probable tokens are kept, as many as are needed to reach this share
    top_k: int = 0  # as many of the most probable tokens are kept, of equal ones the lower ids; 0 keeps all
    min_p: float = 0.0  # tokens are kept that are this many times as probable as the most probable one, at least
    presence_penalty: float = 0.0  # taken from the logit of each token that was generated before
    frequency_penalty: float = 0.0  # taken as often as the token was generated before
    repetition_penalty: float = 1.0  # divides positive logits of tokens in prompt or answer, multiplies negative ones
    logit_bias: tuple[tuple[int, float], ...] = ()  # token ids and what is added to their logits

    @property
    def as_it_is(self) -> bool:
        """True if the model's logits are used unchanged, whatever was generated before."""
        return not (self.logit_bias or self.penalises)

    @property
    def penalises(self) -> bool:
        """True if logits depend on the tokens generated before."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


def adjusted(logits: np.ndarray, sampling: Sampling, prompt: np.ndarray, generated: Sequence[int]) -> np.ndarray:
    """The logits after bias and penalties, ``[vocabulary]`` of float64.

    Args:
        logits: ``[vocabulary]``; they stay as they are.
        prompt: the different token ids of the prompt; only the repetition penalty looks at them.
        generated: all tokens after the prompt, in any order.
    """
    found = logits.astype(np.float64)
    for token, bias in sampling.logit_bias:
        found[token] += bias
    if not sampling.penalises:
        return found
    tokens, counts = np.unique(np.asarray(generated, dtype=np.int64), return_counts=True)
    if sampling.repetition_penalty != 1:
        seen = np.union1d(prompt, tokens).astype(np.int64)
        before = found[seen]
        found[seen] = np.where(before > 0, before / sampling.repetition_penalty, before * sampling.repetition_penalty)
    found[tokens] -= sampling.frequency_penalty * counts + sampling.presence_penalty
    return found


def distribution(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The probabilities to draw from, ``[vocabulary]`` of float64.

    Args:
        logits: ``[vocabulary]``, after ``adjusted``; minus infinity for what is impossible, but not for all.
        sampling: with a temperature above 0.
    """
    below = logits.astype(np.float64) - float(logits.max())
    with np.errstate(over="ignore"):  # of temperatures that are next to 0
        probabilities = np.exp(below / sampling.temperature)
    kept = np.flatnonzero(probabilities >= sampling.min_p)  # the largest is 1
    if 0 < sampling.top_k < len(kept):
        least = np.partition(probabilities[kept], -sampling.top_k)[-sampling.top_k]
        kept = kept[probabilities[kept] >= least]
        kept = kept[np.argsort(-probabilities[kept], kind="stable")[: sampling.top_k]]
    if sampling.top_p < 1:
        kept = kept[np.argsort(-probabilities[kept], kind="stable")]
        shares = probabilities[kept] / probabilities[kept].sum()
        kept = kept[np.cumsum(shares) - shares < max(sampling.top_p, 1e-300)]
    found = np.zeros_like(probabilities)
    found[kept] = probabilities[kept] / probabilities[kept].sum()
    return found


def logarithms(logits: np.ndarray) -> np.ndarray:
    """The logarithms of the model's probabilities, ``[vocabulary]`` of float64."""
    shifted = logits.astype(np.float64) - float(logits.max())
    return shifted - np.log(np.exp(shifted).sum())

"""From a model's logits to what is drawn from."""

from __future__ import annotations

import numpy as np


def distribution(logits: np.ndarray, temperature: float, top_p: float) -> np.ndarray:
    """The probabilities to draw from, ``[vocabulary]`` of float64.

    Args:
        logits: ``[vocabulary]``.
        temperature: above 0.
        top_p: of the most probable tokens as many are kept as are needed to reach this share.
    """
    scaled = logits.astype(np.float64) / temperature
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    if top_p < 1:
        order = np.argsort(-probabilities, kind="stable")
        before = np.cumsum(probabilities[order]) - probabilities[order]
        probabilities[order[before >= max(top_p, 1e-300)]] = 0.0
        probabilities /= probabilities.sum()
    return probabilities


def logarithms(logits: np.ndarray) -> np.ndarray:
    """The logarithms of the model's probabilities, ``[vocabulary]`` of float64."""
    shifted = logits.astype(np.float64) - float(logits.max())
    return shifted - np.log(np.exp(shifted).sum())

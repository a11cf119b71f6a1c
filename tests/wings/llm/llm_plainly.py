"""How tokens are drawn, written down as plainly as can be: what tests compare with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.fill.wings.llm.sampling import Sampling


def plainly_adjusted(logits: Any, sampling: Sampling, prompt: Sequence[int], generated: Sequence[int]) -> list[float]:
    """As OpenAI and vLLM write it down, a token at a time."""
    found = []
    for token, logit in enumerate(map(float, logits)):
        logit += dict(sampling.logit_bias).get(token, 0.0)
        if token in prompt or token in generated:
            logit = logit / sampling.repetition_penalty if logit > 0 else logit * sampling.repetition_penalty
        count = generated.count(token)
        found.append(logit - count * sampling.frequency_penalty - (count > 0) * sampling.presence_penalty)
    return found

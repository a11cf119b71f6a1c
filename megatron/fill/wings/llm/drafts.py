"""Draft models before they are tuned: new ones, or from a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.fill.errors import TaskError
from megatron.fill.sidetask.checks import check_whole

if TYPE_CHECKING:
    from megatron.fill.wings.llm.tokenizers import Tokenizer

INNER = "model."  # before the names of a draft's weights
_POSITIONS = 131_072  # that a new draft may be asked for; rotary ones cost nothing
_SHAPE = {"layers": 1, "hidden": 64, "heads": 4}


def checked_shape(draft: str | None, shape: dict[str, int] | None) -> dict[str, int]:
    """The shape of new drafts, with defaults for what is not given.

    Raises:
        ValueError: it is none, or there are drafts to begin with besides.
    """
    if draft is not None and shape is not None:
        raise ValueError(f"draft is {draft!r} and shape is {shape!r}: expected one of the two")
    unknown = sorted(set(shape or {}) - set(_SHAPE))
    if unknown:
        raise ValueError(f"shape has {unknown[0]!r}: expected some of {', '.join(_SHAPE)}")
    whole = _SHAPE | (shape or {})
    check_whole(**{f"shape.{name}": (value, 1) for name, value in whole.items()})
    if whole["hidden"] % (2 * whole["heads"]):
        raise ValueError(f"shape is {whole}: expected hidden to be a multiple of twice the heads")
    return whole


def new_draft(folder: Path | None, shape: dict[str, int], tokenizer: Tokenizer, length: int, seed: int) -> Any:
    """A draft that takes token ids and gives logits, ``[samples, length, vocabulary]``.

    Raises:
        TaskError: the folder's model cannot be loaded, is too short, or has other tokens.
    """
    import torch

    from megatron.fill.wings.llm.attention import context_of
    from megatron.fill.wings.llm.models import load_language_model

    if folder is not None:
        model, own = load_language_model(folder, "float32")
        if not own.same_tokens(tokenizer):
            raise TaskError(f"draft {folder} has other tokens than the model: expected the same tokenizer")
        if context_of(model).tokens < length:
            raise TaskError(
                f"draft {folder} takes {context_of(model).tokens} tokens; expected length, {length}, or more"
            )
    else:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=tokenizer.size,
            hidden_size=shape["hidden"],
            intermediate_size=4 * shape["hidden"],
            num_hidden_layers=shape["layers"],
            num_attention_heads=shape["heads"],
            max_position_embeddings=_POSITIONS,
            bos_token_id=None,
            eos_token_id=min(tokenizer.eos_ids, default=None),
            initializer_range=shape["hidden"] ** -0.5,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = LlamaForCausalLM(config)

    class Logits(torch.nn.Module):
        """Without the cache, which ``torch.export`` cannot give."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor) -> Any:
            return self.model(input_ids=input_ids, use_cache=False).logits

    return Logits()

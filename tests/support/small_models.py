"""Causal language models of several families, small enough to be made in a test."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

LETTERS = string.ascii_letters[:39] + "."
VOCABULARY = len(LETTERS)
CONTEXT = 192
FAMILIES = ("llama", "gpt2", "opt", "qwen2", "qwen3", "gpt_neox")


def model(
    family: str = "llama",
    seed: int = 0,
    layers: int = 3,
    hidden: int = 32,
    noise: float = 0.0,
    head_dim: int | None = None,
    context: int = CONTEXT,
) -> Any:
    """A model with random weights, large enough for its tokens to be sure.

    Args:
        noise: added to all weights: a draft that is close to the model without it.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    names = {"gpt2": {"n_embd": hidden, "n_layer": layers, "n_head": 4, "n_positions": context}}
    usual = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "max_position_embeddings": context,
    }
    inner = (
        {"ffn_dim": 2 * hidden, "word_embed_proj_dim": hidden} if family == "opt" else {"intermediate_size": 2 * hidden}
    )
    grouped = {"num_key_value_heads": 2} if family in ("llama", "qwen2", "qwen3") else {}
    wide = {"head_dim": head_dim or hidden // 4} if family == "qwen3" or head_dim else {}
    shape = names.get(family) or usual | inner | grouped | wide
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(family, vocab_size=VOCABULARY, **shape, initializer_range=0.3)
        config.eos_token_id = config.pad_token_id = config.bos_token_id = None
        made = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.add_(noise * torch.randn_like(parameter))
    return made


def alone(made: Any, prompt: list[int], count: int) -> list[int]:
    """What ``transformers`` itself generates after the prompt, by greedy decoding."""
    import torch

    inputs = torch.tensor([prompt])
    with torch.no_grad():
        tokens = made.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=count, do_sample=False)
    return tokens[0, len(prompt) :].tolist()


def folder(path: Path, made: Any, template: str | None = None) -> Path:
    """The model saved with a tokenizer whose token n is a letter: the n-th of ``LETTERS``; the last one ends a text."""
    from tokenizers import Tokenizer, decoders, models
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    letters = Tokenizer(
        models.WordLevel({letter: number for number, letter in enumerate(LETTERS)}, unk_token=LETTERS[0])
    )
    letters.pre_tokenizer = Split("", "isolated")
    letters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token=LETTERS[-1])
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    made.save_pretrained(path)
    for file in path.iterdir():
        file.chmod(0o644)  # jobs run as a user without rights
    return path

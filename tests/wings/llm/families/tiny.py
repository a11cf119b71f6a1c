"""Tiny models with random weights of every family of causal language models that ``transformers`` has."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from tests.support.small_models import VOCABULARY

CONTEXT = 192  # tokens
WINDOW = 24
_MOST = 30_000_000  # parameters

# Sizes by the names that configs have for them.
_SIZES: dict[str, Any] = {
    name: size
    for size, names in (
        (4, "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers"),
        (64, "hidden_size d_model n_embd dim word_embed_proj_dim embedding_size emb_dim"),
        (4, "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads"),
        (4, "linear_num_value_heads mamba_n_heads"),
        (2, "num_key_value_heads num_kv_heads n_head_kv linear_num_key_heads kv_n_heads"),
        (16, "head_dim global_head_dim qk_nope_head_dim v_head_dim d_kv kv_channels linear_key_head_dim"),
        (16, "linear_value_head_dim attention_head_dim hidden_size_per_layer_input"),
        (8, "qk_rope_head_dim rotary_dim"),
        (32, "q_lora_rank kv_lora_rank"),
        (128, "intermediate_size ffn_dim n_inner decoder_ffn_dim encoder_ffn_dim moe_intermediate_size inner_dim"),
        (128, "shared_expert_intermediate_size ffn_hidden_size moe_ffn_hidden_size expert_ffn_hidden_size"),
        (128, "shared_intermediate_size mlp_hidden_size intermediate_size_mlp"),
        (4, "num_experts n_routed_experts num_local_experts moe_num_experts num_routed_experts"),
        (2, "num_experts_per_tok moe_k moe_top_k num_experts_per_token top_k_experts"),
        (1, "n_group topk_group n_shared_experts num_shared_experts num_nextn_predict_layers"),
        (CONTEXT, "max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length seq_length"),
        (CONTEXT, "context_length max_target_positions"),
        (0.3, "initializer_range init_std"),  # so large that tokens are sure
        (WINDOW, "sliding_window attention_chunk_size window_size attention_window_size local_window_size"),
        (VOCABULARY, "vocab_size vocab_size_per_layer_input"),
        (True, "is_decoder"),
    )
    for name in names.split()
}
# Without a value these are worked out from others, which some configs forget to do.
_SET_WITHOUT = {"head_dim", "num_key_value_heads", "num_kv_heads", "n_head_kv", "intermediate_size", "n_inner"} | {
    *("num_experts_per_tok", "n_routed_experts", "n_shared_experts"),
}
_TOKEN_IDS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}

# What a family's own rules ask for; None leaves the config's default, or what it works out itself.
_FAMILIES: dict[str, dict[str, Any]] = {
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 128},
    },
    "gemma3n_text": {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0] * 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"head_dim": 32},
    "prophetnet": {"num_hidden_layers": None, "num_decoder_layers": 4, "num_decoder_attention_heads": 4},
    "reformer": {"axial_pos_embds": False},
    "xlm": {"n_layers": 4},
    "xlnet": {"d_inner": 128},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
# Multi-head latent attention: each head has keys and values of its own, and the width of a rotated head is not chosen.
_LATENT = {"num_key_value_heads": 4, "head_dim": None}


@dataclasses.dataclass(frozen=True, slots=True)
class NotBuiltError(Exception):
    """No tiny model of a family can be made.

    Attributes:
        why: in one line.
    """

    why: str

    def __str__(self) -> str:
        return self.why


def families() -> dict[str, str]:
    """The model type of every family, with the class of its causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as names

    return {name: found if isinstance(found, str) else found[0] for name, found in sorted(names.items())}


def tiny_model(family: str, seed: int = 0) -> Any:
    """A model with random weights in single precision, in evaluation mode, that computes logits.

    Raises:
        NotBuiltError: none of the configs that are tried fits the family.
    """
    first: Exception | None = None
    for config in _configs(family):
        try:
            return _built(config(), seed)
        except NotBuiltError:
            raise
        except Exception as error:  # whatever a config's checks or a model's code raise
            first = first or error
    assert first is not None
    raise NotBuiltError(one_line(first)) from first


def one_line(error: BaseException, most: int = 200) -> str:
    """An error in one line of at most so many characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:most]


def _built(config: Any, seed: int) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        size = sum(one.numel() for one in AutoModelForCausalLM.from_config(config).parameters())
    if size > _MOST:
        raise NotBuiltError(
            f"it has {size:,} parameters with the sizes that are known here; at most {_MOST:,} are taken"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = made(input_ids=torch.tensor([[9, 10, 11, 12, 13]]), use_cache=False).logits
    if not logits.isfinite().any():
        raise NotBuiltError("its logits with random weights are no numbers")
    return made


def _configs(family: str) -> Iterator[Callable[[], Any]]:
    """Functions that make a config, the one that tells most first."""
    for all_kinds in (True, False):
        for ids in (_TOKEN_IDS, dict.fromkeys(_TOKEN_IDS)):
            for without in (frozenset[str](), frozenset({"head_dim", "global_head_dim"})):
                yield partial(_family_config, family, all_kinds, ids, without)


def _family_config(family: str, all_kinds: bool, ids: Mapping[str, int | None], without: frozenset[str]) -> Any:
    from transformers import AutoConfig

    return _shrunk(AutoConfig.for_model(family), all_kinds, ids, without)


def _shrunk(base: Any, all_kinds: bool, ids: Mapping[str, int | None], without: frozenset[str]) -> Any:
    """A config with small sizes.

    Args:
        all_kinds: with a layer of each kind that the family has, whatever its pattern.
        ids: of the special tokens.
        without: sizes that are left out.
    """
    names = {field.name for field in dataclasses.fields(base) if field.init}
    parts = {name: base.__dict__.get(name) for name in names}
    own = (_LATENT if "qk_rope_head_dim" in names else {}) | _FAMILIES.get(base.model_type, {})
    sizes = {name: size for name, size in _SIZES.items() if name in names and name not in without}
    sizes = {name: size for name, size in sizes.items() if parts[name] is not None or name in _SET_WITHOUT}
    wanted = sizes | {name: ids[name] for name in _TOKEN_IDS if name in names} | own
    wanted |= {
        name: _shrunk(part, all_kinds, ids, without)
        for name, part in parts.items()
        if hasattr(part, "model_type") and dataclasses.is_dataclass(part) and name not in own
    }
    kinds = list(dict.fromkeys(parts.get("layer_types") or ()))
    if all_kinds and len(kinds) > 1 and "layer_types" in names:
        kinds.sort(key=lambda kind: kind == "full_attention")
        wanted["layer_types"] = (kinds * 4)[: max(4, len(kinds))][-max(4, len(kinds)) :]
        for name in ("num_hidden_layers", "num_layers", "n_layer"):
            if name in wanted:
                wanted[name] = len(wanted["layer_types"])
    return type(base)(**{name: value for name, value in wanted.items() if value is not None or name in ids})

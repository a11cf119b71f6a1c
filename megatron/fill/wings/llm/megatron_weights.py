"""The weights of a Megatron GPT under their names in ``transformers``."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch

from megatron.fill.errors import TaskError

Weights = dict[str, torch.Tensor]
# Flags that change what a layer computes, with the value that every model here has.
_USUAL = {
    "num_experts": None,
    "multi_latent_attention": False,
    "mtp_num_layers": None,
    "qk_layernorm": False,
    "qk_l2_norm": False,
    "squared_relu": False,
    "quick_geglu": False,
    "rotary_interleaved": False,
    "rotary_seq_len_interpolation_factor": None,
    "use_rope_scaling": False,
    "apply_residual_connection_post_layernorm": False,
    "softmax_type": "vanilla",
    "window_size": None,
    "attention_output_gate": False,
    "linear_attention_freq": None,
    "use_mup": False,
    "heterogeneous_layers_config_path": None,
    "no_rope_freq": None,
    "activation_func_clamp_value": None,
    "glu_linear_offset": 0.0,
    "window_attn_skip_freq": None,
    "experimental_attention_variant": None,
}


def converted(args: Namespace, weights: Weights) -> Any:
    """A causal language model of ``transformers`` with these weights.

    The rows that fill the vocabulary up stay: Megatron's loss counts them too.

    Args:
        weights: tensors by their names in Megatron, all layers of a kind in one tensor.

    Raises:
        TaskError: no model is like it; the message names the flag.
    """
    for name, usual in _USUAL.items():
        value = getattr(args, name, usual)
        if value != usual:
            flag = name.replace("_", "-")
            raise TaskError(f"the checkpoint was trained with --{flag} {value}: expected {usual}")
    position, norm = args.position_embedding_type, args.normalization
    make = _KINDS.get((position, norm, args.swiglu, args.add_bias_linear))
    if make is None:
        raise TaskError(
            f"the checkpoint was trained with --position-embedding-type {position}, --normalization {norm}, swiglu "
            f"{args.swiglu} and biases {args.add_bias_linear}: expected learned_absolute or rope with LayerNorm "
            "and biases without swiglu, or rope with RMSNorm, swiglu and --disable-bias-linear"
        )
    if _groups(args) != args.num_attention_heads and make is not _llama:
        raise TaskError("the checkpoint was trained with --group-query-attention: expected it with swiglu only")
    return make(args, _plainly_named(args, weights))


def _groups(args: Namespace) -> int:
    return args.num_query_groups if args.group_query_attention else args.num_attention_heads


def _gelu(args: Namespace) -> str:
    """Megatron's fusion of bias and GELU is the approximation with tanh; without it, it is the function itself."""
    return "gelu_pytorch_tanh" if args.bias_gelu_fusion or args.openai_gelu else "gelu"


def _plainly_named(args: Namespace, weights: Weights) -> Weights:
    """The weights by the names of local layers, norms around 1.

    In those of Transformer Engine, the norm before a linear layer is a part of it.
    """
    found = {}
    for name, tensor in weights.items():
        plain = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
        plain = plain.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
        shifted = args.layernorm_zero_centered_gamma and plain.endswith("layernorm.weight")
        found[plain] = tensor + 1.0 if shifted else tensor
    return found


def _model(
    kind: str, args: Namespace, weights: Weights, in_layers: dict[str, str], outside: dict[str, str], **config: Any
) -> Any:
    """A model with these weights under its own names.

    Args:
        in_layers: its names of a layer's parts, with ``{}`` for the layer's number, by those in Megatron.
        outside: its names of the other parts, by those in Megatron, without the one that makes logits.
        config: fields of its config.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    tied, embedding = not args.untie_embeddings_and_output_weights, weights["embedding.word_embeddings.weight"]
    made = AutoConfig.for_model(
        kind,
        vocab_size=len(embedding),
        hidden_size=args.hidden_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=args.num_attention_heads,
        max_position_embeddings=args.max_position_embeddings,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **config,
    )
    model = AutoModelForCausalLM.from_config(made, dtype=embedding.dtype)
    output = next(name for name, part in model.named_modules() if part is model.get_output_embeddings())
    found: Weights = {f"{output}.weight": embedding if tied else weights["output_layer.weight"]}
    for part in ("weight", "bias"):
        for name, theirs in in_layers.items():
            for layer, tensor in enumerate(weights.get(f"decoder.layers.{name}.{part}", ())):
                found[f"{theirs.format(layer)}.{part}"] = tensor
        for name, theirs in outside.items():
            if f"{name}.{part}" in weights:
                found[f"{theirs}.{part}"] = weights[f"{name}.{part}"]
    lacking, unexpected = model.load_state_dict(found, strict=False)
    if lacking or unexpected:
        raise TaskError(f"the checkpoint lacks {lacking[:3]} and has {unexpected[:3]}: expected weights of a {kind}")
    model.tie_weights()
    return model.eval()


def _qkv(args: Namespace, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values, ``[layers, outputs, ...]``: Megatron has each query group's together."""
    groups, per_group = _groups(args), args.num_attention_heads // _groups(args)
    rest = tensor.shape[2:]
    parts = tensor.reshape(tensor.shape[0], groups, per_group + 2, args.kv_channels, *rest)
    split = parts[:, :, :per_group], parts[:, :, per_group : per_group + 1], parts[:, :, per_group + 1 :]
    queries, keys, values = (part.reshape(tensor.shape[0], -1, *rest) for part in split)
    return queries, keys, values


def _gpt2(args: Namespace, weights: Weights) -> Any:
    if args.kv_channels * args.num_attention_heads != args.hidden_size:
        raise TaskError(f"the checkpoint was trained with --kv-channels {args.kv_channels}: expected size / heads")
    linear = {
        "self_attention.linear_qkv": "transformer.h.{}.attn.c_attn",
        "self_attention.linear_proj": "transformer.h.{}.attn.c_proj",
        "mlp.linear_fc1": "transformer.h.{}.mlp.c_fc",
        "mlp.linear_fc2": "transformer.h.{}.mlp.c_proj",
    }
    for part in ("weight", "bias"):
        name = f"decoder.layers.self_attention.linear_qkv.{part}"
        weights[name] = torch.cat(_qkv(args, weights[name]), dim=1)
    for name in linear:  # GPT-2 has its matrices the other way around
        weights[f"decoder.layers.{name}.weight"] = weights[f"decoder.layers.{name}.weight"].transpose(1, 2)
    norms = {"input_layernorm": "transformer.h.{}.ln_1", "pre_mlp_layernorm": "transformer.h.{}.ln_2"}
    outside = {
        "embedding.word_embeddings": "transformer.wte",
        "embedding.position_embeddings": "transformer.wpe",
        "decoder.final_layernorm": "transformer.ln_f",
    }
    return _model(
        "gpt2",
        args,
        weights,
        norms | linear,
        outside,
        n_inner=args.ffn_hidden_size,
        layer_norm_epsilon=args.layernorm_epsilon,
        activation_function=_gelu(args),
    )


def _gpt_neox(args: Namespace, weights: Weights) -> Any:
    in_layers = {
        "input_layernorm": "gpt_neox.layers.{}.input_layernorm",
        "pre_mlp_layernorm": "gpt_neox.layers.{}.post_attention_layernorm",
        "self_attention.linear_qkv": "gpt_neox.layers.{}.attention.query_key_value",  # each head's together, as here
        "self_attention.linear_proj": "gpt_neox.layers.{}.attention.dense",
        "mlp.linear_fc1": "gpt_neox.layers.{}.mlp.dense_h_to_4h",
        "mlp.linear_fc2": "gpt_neox.layers.{}.mlp.dense_4h_to_h",
    }
    outside = {"embedding.word_embeddings": "gpt_neox.embed_in", "decoder.final_layernorm": "gpt_neox.final_layer_norm"}
    return _model(
        "gpt_neox",
        args,
        weights,
        in_layers,
        outside,
        intermediate_size=args.ffn_hidden_size,
        layer_norm_eps=args.layernorm_epsilon,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": float(args.rotary_base),
            "partial_rotary_factor": args.rotary_percent,
        },
        hidden_act=_gelu(args),
        use_parallel_residual=False,
    )


def _llama(args: Namespace, weights: Weights) -> Any:
    if args.rotary_percent != 1.0:
        raise TaskError(f"the checkpoint was trained with --rotary-percent {args.rotary_percent}: expected 1.0")
    for part in ("weight", "bias"):
        tensor = weights.get(f"decoder.layers.self_attention.linear_qkv.{part}")
        if tensor is not None:
            for name, one in zip("qkv", _qkv(args, tensor), strict=True):
                weights[f"decoder.layers.{name}.{part}"] = one
    gate, up = weights["decoder.layers.mlp.linear_fc1.weight"].chunk(2, dim=1)
    weights |= {"decoder.layers.gate.weight": gate, "decoder.layers.up.weight": up}
    in_layers = {
        "input_layernorm": "model.layers.{}.input_layernorm",
        "pre_mlp_layernorm": "model.layers.{}.post_attention_layernorm",
        "q": "model.layers.{}.self_attn.q_proj",
        "k": "model.layers.{}.self_attn.k_proj",
        "v": "model.layers.{}.self_attn.v_proj",
        "self_attention.linear_proj": "model.layers.{}.self_attn.o_proj",
        "gate": "model.layers.{}.mlp.gate_proj",
        "up": "model.layers.{}.mlp.up_proj",
        "mlp.linear_fc2": "model.layers.{}.mlp.down_proj",
    }
    outside = {"embedding.word_embeddings": "model.embed_tokens", "decoder.final_layernorm": "model.norm"}
    return _model(
        "qwen2" if "decoder.layers.q.bias" in weights else "llama",
        args,
        weights,
        in_layers,
        outside,
        num_key_value_heads=_groups(args),
        head_dim=args.kv_channels,
        intermediate_size=args.ffn_hidden_size,
        rms_norm_eps=args.layernorm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": float(args.rotary_base)},
    )


# By position embedding, normalization, whether with SwiGLU, and whether with biases.
_KINDS = {
    ("learned_absolute", "LayerNorm", False, True): _gpt2,
    ("rope", "LayerNorm", False, True): _gpt_neox,
    ("rope", "RMSNorm", True, False): _llama,
}

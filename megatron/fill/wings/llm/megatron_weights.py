"""The weights of a Megatron GPT under their names in ``transformers``."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
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
        args: the training's arguments.
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
    if position == "learned_absolute" and norm == "LayerNorm" and not args.swiglu and args.add_bias_linear:
        make: Callable[[Namespace, Weights], Any] = _gpt2
    elif position == "rope" and norm == "LayerNorm" and not args.swiglu and args.add_bias_linear:
        make = _gpt_neox
    elif position == "rope" and norm == "RMSNorm" and args.swiglu and not args.add_bias_linear:
        make = _llama
    else:
        raise TaskError(
            f"the checkpoint was trained with --position-embedding-type {position}, --normalization {norm}, swiglu "
            f"{args.swiglu} and biases {args.add_bias_linear}: expected learned_absolute or rope with LayerNorm "
            "and biases without swiglu, or rope with RMSNorm, swiglu and --disable-bias-linear"
        )
    if _groups(args) != args.num_attention_heads and make is not _llama:
        raise TaskError("the checkpoint was trained with --group-query-attention: expected it with swiglu only")
    return make(args, weights)


def _groups(args: Namespace) -> int:
    return args.num_query_groups if args.group_query_attention else args.num_attention_heads


def _gelu(args: Namespace) -> str:
    """Megatron's fusion of bias and GELU is the approximation with tanh; without it, it is the function itself."""
    return "gelu_pytorch_tanh" if args.bias_gelu_fusion or args.openai_gelu else "gelu"


def _model(kind: str, args: Namespace, found: Weights, **config: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    tied = not args.untie_embeddings_and_output_weights
    made = AutoConfig.for_model(
        kind,
        vocab_size=next(iter(found.values())).shape[0],
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **config,
    )
    model = AutoModelForCausalLM.from_config(made, dtype=next(iter(found.values())).dtype)
    missing, unexpected = model.load_state_dict(found, strict=False)
    lacking = [name for name in missing if not (tied and name == "lm_head.weight")]
    if lacking or unexpected:
        raise TaskError(f"the checkpoint lacks {lacking[:3]} and has {unexpected[:3]}: expected weights of a {kind}")
    model.tie_weights()
    return model.eval()


def _take(weights: Weights, *names: str) -> torch.Tensor | None:
    """The first that is there: Transformer Engine's layers have other names than local ones."""
    return next((weights[name] for name in names if name in weights), None)


def _norms(args: Namespace, weights: Weights, names: tuple[str, str, str]) -> Weights:
    """The norms before attention and MLP and the last one, by these names; the first two have ``{}`` for a layer."""
    found: Weights = {}
    layers = "decoder.layers."
    for part in ("weight", "bias"):
        shift = 1.0 if part == "weight" and args.layernorm_zero_centered_gamma else 0.0
        before_attention, before_mlp, last = (
            _take(weights, f"{layers}self_attention.linear_qkv.layer_norm_{part}", f"{layers}input_layernorm.{part}"),
            _take(weights, f"{layers}mlp.linear_fc1.layer_norm_{part}", f"{layers}pre_mlp_layernorm.{part}"),
            _take(weights, f"decoder.final_layernorm.{part}"),
        )
        for tensor, name in ((before_attention, names[0]), (before_mlp, names[1])):
            _by_layer(found, None if tensor is None else tensor + shift, f"{name}.{part}")
        if last is not None:
            found[f"{names[2]}.{part}"] = last + shift
    return found


def _by_layer(found: Weights, tensor: torch.Tensor | None, name: str) -> None:
    """Put each layer's part under its name, which has the layer's number in place of ``{}``."""
    if tensor is not None:
        for layer, part in enumerate(tensor):
            found[name.format(layer)] = part


def _qkv(args: Namespace, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values, ``[layers, outputs, ...]``: Megatron has each query group's together."""
    groups, per_group = _groups(args), args.num_attention_heads // _groups(args)
    rest = tensor.shape[2:]
    parts = tensor.reshape(tensor.shape[0], groups, per_group + 2, args.kv_channels, *rest)
    split = parts[:, :, :per_group], parts[:, :, per_group : per_group + 1], parts[:, :, per_group + 1 :]
    queries, keys, values = (part.reshape(tensor.shape[0], -1, *rest) for part in split)
    return queries, keys, values


def _gpt2(args: Namespace, weights: Weights) -> Any:
    found = {"transformer.wte.weight": weights["embedding.word_embeddings.weight"]}
    found["transformer.wpe.weight"] = weights["embedding.position_embeddings.weight"]
    found |= _norms(args, weights, ("transformer.h.{}.ln_1", "transformer.h.{}.ln_2", "transformer.ln_f"))
    attention, mlp = "decoder.layers.self_attention", "decoder.layers.mlp"
    for part in ("weight", "bias"):
        whole = torch.cat(_qkv(args, weights[f"{attention}.linear_qkv.{part}"]), dim=1)
        tensors = {
            "attn.c_attn": whole,
            "attn.c_proj": weights[f"{attention}.linear_proj.{part}"],
            "mlp.c_fc": weights[f"{mlp}.linear_fc1.{part}"],
            "mlp.c_proj": weights[f"{mlp}.linear_fc2.{part}"],
        }
        for name, tensor in tensors.items():  # GPT-2 has its matrices the other way around
            turned = tensor.transpose(1, 2) if part == "weight" else tensor
            _by_layer(found, turned, f"transformer.h.{{}}.{name}.{part}")
    if args.untie_embeddings_and_output_weights:
        found["lm_head.weight"] = weights["output_layer.weight"]
    if args.kv_channels * args.num_attention_heads != args.hidden_size:
        raise TaskError(f"the checkpoint was trained with --kv-channels {args.kv_channels}: expected size / heads")
    return _model(
        "gpt2",
        args,
        found,
        n_embd=args.hidden_size,
        n_layer=args.num_layers,
        n_head=args.num_attention_heads,
        n_inner=args.ffn_hidden_size,
        n_positions=args.max_position_embeddings,
        layer_norm_epsilon=args.layernorm_epsilon,
        activation_function=_gelu(args),
    )


def _gpt_neox(args: Namespace, weights: Weights) -> Any:
    layer = "gpt_neox.layers.{}."
    found = {"gpt_neox.embed_in.weight": weights["embedding.word_embeddings.weight"]}
    norms = f"{layer}input_layernorm", f"{layer}post_attention_layernorm", "gpt_neox.final_layer_norm"
    found |= _norms(args, weights, norms)
    linear = {
        "self_attention.linear_qkv": "attention.query_key_value",  # each head's together, as here
        "self_attention.linear_proj": "attention.dense",
        "mlp.linear_fc1": "mlp.dense_h_to_4h",
        "mlp.linear_fc2": "mlp.dense_4h_to_h",
    }
    for name, theirs in linear.items():
        for part in ("weight", "bias"):
            _by_layer(found, weights[f"decoder.layers.{name}.{part}"], f"{layer}{theirs}.{part}")
    output = "output_layer.weight" if args.untie_embeddings_and_output_weights else "embedding.word_embeddings.weight"
    found["embed_out.weight"] = weights[output]
    return _model(
        "gpt_neox",
        args,
        found,
        hidden_size=args.hidden_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=args.num_attention_heads,
        intermediate_size=args.ffn_hidden_size,
        max_position_embeddings=args.max_position_embeddings,
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
    layer = "model.layers.{}."
    found = {"model.embed_tokens.weight": weights["embedding.word_embeddings.weight"]}
    norms = f"{layer}input_layernorm", f"{layer}post_attention_layernorm", "model.norm"
    found |= _norms(args, weights, norms)
    attention, mlp = "decoder.layers.self_attention", "decoder.layers.mlp"
    for part in ("weight", "bias"):
        tensor = _take(weights, f"{attention}.linear_qkv.{part}")
        if tensor is not None:
            for name, one in zip("qkv", _qkv(args, tensor), strict=True):
                _by_layer(found, one, f"{layer}self_attn.{name}_proj.{part}")
    gate, up = weights[f"{mlp}.linear_fc1.weight"].chunk(2, dim=1)
    _by_layer(found, weights[f"{attention}.linear_proj.weight"], f"{layer}self_attn.o_proj.weight")
    _by_layer(found, gate, f"{layer}mlp.gate_proj.weight")
    _by_layer(found, up, f"{layer}mlp.up_proj.weight")
    _by_layer(found, weights[f"{mlp}.linear_fc2.weight"], f"{layer}mlp.down_proj.weight")
    if args.untie_embeddings_and_output_weights:
        found["lm_head.weight"] = weights["output_layer.weight"]
    biased = f"{attention}.linear_qkv.bias" in weights
    return _model(
        "qwen2" if biased else "llama",
        args,
        found,
        hidden_size=args.hidden_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=args.num_attention_heads,
        num_key_value_heads=_groups(args),
        head_dim=args.kv_channels,
        intermediate_size=args.ffn_hidden_size,
        max_position_embeddings=args.max_position_embeddings,
        rms_norm_eps=args.layernorm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": float(args.rotary_base)},
    )

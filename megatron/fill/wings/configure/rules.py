"""Flags that Megatron refuses together, or one without another; of a whole command, and of a search's layouts.

As in Megatron-core 0.19: ``validate_args`` and ``core_transformer_config_from_args`` of ``training``, the checks of
``TransformerConfig``, ``ModelParallelConfig``, ``OptimizerConfig`` and ``initialize_model_parallel``, and what experts
raise in a pass.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import NamedTuple

from megatron.fill.wings.mainjob.parallel import Parallel

_TP, _EXPERT_TP = "--tensor-model-parallel-size", "--expert-tensor-parallel-size"
_PP = "--pipeline-model-parallel-size"
# Facts that several flags may tell, or that hold where none says otherwise.
_CHUNKS, _DROPOUT = "virtual stages", "--{}-dropout above 0"
_DENSE = "layers without experts"
_GRAPHS = "CUDA graphs of {}"  # attn, mlp or moe, alone or in one with the whole layer
_SELECTIVE = "--recompute-granularity selective|--recompute-activations"
# What a search chooses: rules about it are for each of its layouts.
_SEARCHED = frozenset(
    (
        *(_TP, _EXPERT_TP, _PP, _CHUNKS, "--sequence-parallel", "--use-distributed-optimizer"),
        *("--recompute-granularity", "--recompute-activations", "--recompute-modules"),
    )
)


class Rule(NamedTuple):
    """Facts that Megatron refuses together; each is a flag, or ``--flag value``, and ``|`` means either."""

    given: tuple[str, ...]  # all of these
    without: str = ""  # and not this
    reason: str = ""  # Megatron's; "" where it has none

    def problem(self, facts: Collection[str]) -> str:
        """Return what is wrong with a training of which these facts hold; "" if nothing is."""
        found = [next((one for one in its.split("|") if one in facts), "") for its in self.given]
        others = self.without.split("|") if self.without else []
        if not all(found) or any(one in facts for one in others):
            return ""
        missing = f" without {' or '.join(others)}" if others else ""
        expected = "one of them left out" if len(found) > 1 else "it left out"
        if others:
            expected = "both, or neither" if len(found) == len(others) == 1 else "that too"
        why = f" (Megatron: {self.reason})" if self.reason else ""
        together = " with ".join((found[0], " and ".join(found[1:]))) if len(found) > 1 else found[0]
        return f"{together}{missing}; expected {expected}{why}"

    @property
    def of_layouts(self) -> bool:
        """True if a search chooses what it is about."""
        return any(map(_is_searched, "|".join((*self.given, self.without)).split("|")))

    def may_break(self, facts: Collection[str]) -> bool:
        """Return True if some layout of a training of which these facts hold may break it."""
        chosen = filter(_is_searched, "|".join(self.given).split("|"))
        return self.of_layouts and bool(self.problem({*facts, *chosen}))


def _is_searched(fact: str) -> bool:
    return fact in _SEARCHED or fact.partition(" ")[0] in _SEARCHED


_ENGINE_RECIPES = "|".join(f"--fp8-recipe {its}" for its in ("tensorwise", "mxfp8", "blockwise", "custom"))
_NOT_SOFTMAX = "--moe-router-score-function sigmoid|--moe-router-score-function sqrtsoftplus"
_AT_STEP = "--overlap-param-gather-with-optimizer-step"
_SENDERS = "--moe-token-dispatcher-type alltoall|--moe-token-dispatcher-type flex"
_EXPERTS = "--overlap-moe-expert-parallel-comm"
_SAVED = "--distribute-saved-activations"
_DEFERRED = "--defer-embedding-wgrad-compute"
_WHOLE_LOOP = "|".join(f"--cuda-graph-{its} full_iteration" for its in ("impl", "modules", "scope"))
_FLUSHED = "--overlap-p2p-communication-warmup-flush"
_GRAPHED = "--cuda-graph-impl local|--cuda-graph-impl transformer_engine"
_PARTS = "--cuda-graph-modules {0}|--cuda-graph-scope {0}"
_PRECISE = "--use-precision-aware-optimizer"
_OPTIMIZED = "--transformer-impl inference_optimized"
_TIERED = "--hierarchical-context-parallel-sizes"
_INSTANCES = "--num-distributed-optimizer-instances"
STAGES_FIRST = "--use-tp-pp-dp-mapping"
_FORMER = {  # flags that Megatron's parser has to say what came in their place
    "--batch-size": "--micro-batch-size",
    "--warmup": "--lr-warmup-fraction",
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--checkpoint-activations": "--recompute-activations",
}
_RULES = (
    *(Rule((flag,), "", f"no longer valid, use {its} instead") for flag, its in _FORMER.items()),
    Rule(("--bf16", "--fp16")),
    Rule(("--num-query-groups",), "--group-query-attention"),
    Rule(
        ("--multi-latent-attention", "--group-query-attention"),
        "",
        "Group query attention is mutually exclusive with multi latent attention.",
    ),
    Rule(("--squared-relu", "--swiglu")),
    Rule(("--quick-geglu", "--swiglu")),
    Rule(
        ("--quick-geglu", _DENSE),
        "--disable-bias-linear|--no-bias-gelu-fusion",
        "Only support fusion of gelu and swiglu",
    ),
    Rule(
        ("--squared-relu",),
        "--disable-bias-linear|--no-bias-gelu-fusion",
        "When bias_activation_fusion is True, activation function should be either gelu, swiglu, or quick_geglu",
    ),
    Rule(
        ("--attention-backend local",), "--spec local", "--attention-backend local is only supported with --spec local"
    ),
    Rule(
        ("--mtp-num-layers",),
        "--position-embedding-type rope|--position-embedding-type none",
        "The supported position embedding types are rope and none.",
    ),
    Rule(
        ("--no-position-embedding",),
        "--position-embedding-type rope|--use-rotary-position-embeddings",
        "--no-position-embedding is deprecated, use --position-embedding-type",
    ),
    Rule(
        ("--position-embedding-type mrope",),
        "--mrope-section|--use-rotary-position-embeddings",
        "--mrope-section should be set when using --position-embedding-type mrope.",
    ),
    Rule(("--rope-type yarn",), "--multi-latent-attention", 'Common attention only support rope_type="rope"'),
    Rule(
        ("--multi-latent-attention", "--rotary-interleaved"),
        "",
        "rotary_interleaved does not work with multi_latent_attention.",
    ),
    Rule(("--fp16-lm-cross-entropy",), "--fp16", "lm cross entropy in fp16 only support in fp16 mode."),
    Rule(
        ("--fp32-residual-connection",),
        "--bf16|--fp16",
        "residual connection in fp32 only supported when using fp16 or bf16.",
    ),
    Rule(
        ("--bf16", "--accumulate-allreduce-grads-in-fp32", "--main-grads-dtype bf16"),
        "",
        "--main-grads-dtype can only be fp32 when --accumulate-allreduce-grads-in-fp32 is set",
    ),
    Rule(
        ("--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl te"),
        "",
        "Transformer Engine cross entropy loss fusion is disabled due to stability issues.",
    ),
    Rule(
        ("--fp8-format", "--fp8-recipe custom"),
        "--fp8-quantizer-factory",
        "fp8_quantizer_factory must be provided when fp8_recipe is 'custom'.",
    ),
    Rule(
        ("--reuse-grad-buf-for-mxfp8-param-ag",),
        "--fp8-param-gather",
        "Reuse grad buffer only when keeping params in MXFP8.",
    ),
    Rule((_OPTIMIZED,), "--normalization RMSNorm"),
    Rule((_OPTIMIZED,), "--disable-bias-linear"),
    Rule(
        ("--fused-residual-rmsnorm",),
        "--normalization RMSNorm",
        "fused_residual_rmsnorm is only supported when normalization is RMSNorm.",
    ),
    Rule(
        ("--mla-down-proj-fusion",),
        "--multi-latent-attention",
        "--mla-down-proj-fusion requires --multi-latent-attention",
    ),
    Rule(
        ("--batch-invariant-mode",),
        "--attention-backend flash",
        "Batch invariant mode only supports FlashAttention (--attention-backend flash)",
    ),
    Rule((_PRECISE,), "--use-distributed-optimizer", f"{_PRECISE} only supported with distributed optimizer"),
    *(
        Rule(
            ("|".join(f"--{its}-dtype {kind}" for kind in ("bf16", "fp16", "fp8")),),
            _PRECISE,
            f"{its.replace('-', '_')}_dtype can only be fp32 when not using precision-aware optimizer",
        )
        for its in ("main-grads", "main-params", "exp-avg", "exp-avg-sq")
    ),
    Rule(
        ("--mock-data", "--data-path|--train-data-path|--valid-data-path|--test-data-path"),
        "",
        "A single data source must be provided in training mode",
    ),
    Rule(("--save",), "--save-interval|--persistent-save-interval"),
    Rule(("--ckpt-format torch_dcp|--ckpt-format fsdp_dtensor",), "", "it is only tested with FSDP."),
    *(
        Rule(("--train-iters", its), "", "expected iteration-based training")
        for its in ("--train-samples", "--lr-decay-samples", "--lr-warmup-samples")
    ),
    *(
        Rule(("--train-samples", its), "", "expected sample-based training")
        for its in ("--lr-decay-iters", "--lr-warmup-iters")
    ),
    Rule(("--lr-warmup-fraction", "--lr-warmup-iters|--lr-warmup-samples"), "", "can only specify one of the two"),
    *(
        Rule(("--weight-decay-incr-style linear|--weight-decay-incr-style cosine",), its)
        for its in ("--start-weight-decay", "--end-weight-decay")
    ),
    Rule(("--deterministic-mode", "--cross-entropy-loss-fusion"), "", "requires: cross_entropy_loss_fusion=False"),
    Rule(("--deterministic-mode", "--tp-comm-overlap"), "", "requires: tp_comm_overlap=False"),
    Rule(("--fp8-param-gather",), "--fp8-format"),
    Rule(("--fp8-output-proj",), "--fp8-format"),
    Rule(("--fp8-output-proj",), "--fp8-recipe mxfp8", "fp8_output_proj requires fp8_recipe='mxfp8'"),
    Rule(
        ("--fp8-format", "--first-last-layers-bf16"),
        _ENGINE_RECIPES,
        "Delayed scaling does not support first / last layer in BF16.",
    ),
    Rule(
        (_WHOLE_LOOP,),
        "--no-check-for-nan-in-loss-and-grad|--fp16",
        "--no-check-for-nan-in-loss-and-grad should be set with --cuda-graph-impl=full_iteration for training.",
    ),
    Rule(
        ("--fp8-param-gather",),
        "--use-distributed-optimizer",
        "--fp8-param-gather only supported with distributed optimizer",
    ),
    # Experts
    Rule(("--num-experts",), f"--disable-bias-linear|{_EXPERT_TP} 1", "Bias in Moe is only supported when ETP==1"),
    Rule(
        ("--num-experts", "--transformer-impl local"),
        "--disable-bias-linear",
        "Output 0 of _ReduceFromModelParallelRegion is a view and is being modified inplace.",
    ),
    Rule(
        ("--num-experts", "--swiglu"),
        "--disable-bias-linear|--no-bias-swiglu-fusion",
        "Bias is not supported for weighted swiglu fusion",
    ),
    Rule(
        ("--num-experts",),
        "--disable-bias-linear|--no-bias-gelu-fusion|--swiglu|--quick-geglu",
        "Only support fusion of swiglu and quick_gelu",
    ),
    Rule(
        ("--num-experts", "--moe-grouped-gemm"),
        "--disable-bias-linear|--no-bias-dropout-fusion",
        "bias_dropout_fusion is not supported in TEGroupedMLP when add_bias_linear=True",
    ),
    Rule(("--moe-ffn-hidden-size",), "--num-experts", "moe_ffn_hidden_size is set but num_moe_experts is None."),
    Rule(("--moe-router-group-topk",), "--num-experts"),
    Rule(
        ("--moe-router-padding-for-fp8|--moe-router-padding-for-quantization",),
        "--fp8-format",
        "fp8/fp4 must be specified when moe_router_padding_for_quantization is True.",
    ),
    Rule(
        ("--moe-router-padding-for-fp8|--moe-router-padding-for-quantization",),
        _SENDERS,
        "allgather and alltoall_seq dispatcher does not support moe_router_padding_for_quantization.",
    ),
    Rule(
        ("--moe-flex-dispatcher-backend ncclep",),
        "--moe-token-dispatcher-type flex",
        "moe_flex_dispatcher_backend='ncclep' requires moe_token_dispatcher_type='flex'.",
    ),
    Rule(
        ("--ep-overlap-early-attn-memory-release",),
        _EXPERTS,
        "overlap_moe_expert_parallel_comm must be enabled when enabling ep_overlap_early_attn_memory_release",
    ),
    Rule(
        ("--moe-router-topk 1",),
        f"--moe-router-pre-softmax|{_NOT_SOFTMAX}|--moe-router-load-balancing-type sinkhorn",
        "Please use --moe-router-pre-softmax when topk is 1.",
    ),
    Rule(
        ("--moe-router-enable-expert-bias",),
        _NOT_SOFTMAX,
        "Expert bias for aux-loss-free routing only supports 'sigmoid' and 'sqrtsoftplus' score functions.",
    ),
    Rule(
        ("--moe-pad-expert-input-to-capacity",),
        "--moe-expert-capacity-factor",
        "moe_expert_capacity_factor must be set to use moe_pad_expert_input_to_capacity",
    ),
    Rule(
        (_EXPERTS,),
        _SENDERS,
        "overlap_moe_expert_parallel_comm is supported with alltoall/flex token dispatcher",
    ),
    Rule(
        ("--moe-shared-expert-intermediate-size", "--moe-shared-expert-overlap"),
        _SENDERS,
        "moe_shared_expert_overlap only works with alltoall or flex token dispatcher.",
    ),
    Rule(
        ("--moe-enable-deepep",),
        "--moe-token-dispatcher-type flex",
        "DeepEP backend is only supported with flex token dispatcher.",
    ),
    Rule(
        ("--moe-token-dispatcher-type flex", "--moe-pad-expert-input-to-capacity"),
        "--moe-flex-dispatcher-backend hybridep|--moe-flex-dispatcher-backend ncclep",
        "Flex token dispatcher with deepep backend does not support moe_pad_expert_input_to_capacity",
    ),
    Rule(
        (
            "--moe-expert-capacity-factor",
            "--moe-router-load-balancing-type sinkhorn|--moe-router-load-balancing-type quantile_balancing",
        ),
        "",
        "moe_expert_capacity_factor only works with aux_loss, seq_aux_loss, global_aux_loss or none load balancing",
    ),
    Rule(
        ("--moe-router-group-topk",),
        "--moe-router-num-groups",
        "When using group limited routing, moe_router_num_groups must be specified.",
    ),
    Rule(
        ("--delay-wgrad-compute",),
        _EXPERTS,
        "overlap_moe_expert_parallel_comm must be enabled when enabling delay_wgrad_compute",
    ),
    Rule(
        (_EXPERTS, "--moe-shared-expert-overlap"),
        "",
        "disable moe_shared_expert_overlap when enabling overlap_moe_expert_parallel_comm",
    ),
    # CUDA graphs
    Rule(
        ("--enable-cuda-graph|--external-cuda-graph", f"{_GRAPHED}|--cuda-graph-impl full_iteration"),
        "",
        "Do not use --enable-cuda-graph or --external-cuda-graph with --cuda-graph-impl.",
    ),
    Rule(
        (_GRAPHED, f"{_PARTS.format('moe')}|{_PARTS.format('moe_router')}"),
        "--num-experts",
        "moe cuda graph is only supported for MoE.",
    ),
    Rule(
        ("--cuda-graph-impl full_iteration", "|".join(map(_PARTS.format, ("attn", "mlp", "moe", "moe_router")))),
        "",
        "--cuda-graph-modules must be empty when --cuda-graph-impl=full_iteration.",
    ),
    Rule(
        (_GRAPHED, _PARTS.format("mlp"), "--num-experts"),
        "--moe-layer-freq",
        "mlp cuda graph is only supported for dense layers, but not found in the model.",
    ),
    Rule(
        (_GRAPHED, _PARTS.format("moe"), _PARTS.format("moe_router")),
        "",
        "cuda_graph_modules must not contain both moe and moe_router.",
    ),
    Rule(
        (_GRAPHED, _PARTS.format("moe")),
        "--moe-pad-expert-input-to-capacity",
        "moe cuda graph is only supported with drop-padding MoE.",
    ),
    Rule(
        ("--cuda-graph-impl transformer_engine", _PARTS.format("moe_preprocess")),
        _PARTS.format("moe_router"),
        "moe_preprocess cuda graph is only supported with moe_router cuda graph.",
    ),
    Rule(
        ("--cuda-graph-impl transformer_engine", _PARTS.format("moe_router"), _SELECTIVE, "--recompute-modules moe"),
        "",
        "moe recompute is not supported with moe_router CUDA graph",
    ),
    Rule(
        (_GRAPHS.format("attn"), _SELECTIVE, "--recompute-modules core_attn", _DROPOUT.format("attention")),
        "",
        "attention dropout is not supported with graphed attention recomputation.",
    ),
    *(
        Rule(
            (_GRAPHS.format(its), _SELECTIVE, f"--recompute-modules {its}", _DROPOUT.format("hidden")),
            "",
            "hidden dropout is not supported with graphed MLP/MoE recomputation.",
        )
        for its in ("mlp", "moe")
    ),
    # Recomputation
    Rule(
        ("--recompute-modules mlp", _SELECTIVE, _DENSE),
        "--disable-bias-linear",
        "the backward pass of an MLP that is computed again and has biases never ends",
    ),
    Rule(
        ("--recompute-granularity full", "--cuda-graph-impl local|--cuda-graph-impl transformer_engine"),
        "",
        "full recompute is only supported with full iteration CUDA graph.",
    ),
    Rule(
        (_SELECTIVE, "--recompute-modules moe_act"),
        "--moe-grouped-gemm",
        "moe_act in recompute_modules is only supported with moe_grouped_gemm.",
    ),
    Rule(
        (_SELECTIVE, "--recompute-modules mla_up_proj"),
        "--multi-latent-attention",
        "mla_up_proj in recompute_modules is only supported with multi_latent_attention.",
    ),
    Rule(
        (_SELECTIVE, "--recompute-modules shared_experts", "--moe-shared-expert-overlap"),
        "",
        "shared_experts recompute cannot work with --moe-shared-expert-overlap.",
    ),
    Rule(
        (_SELECTIVE, "--recompute-modules moe_act|--recompute-modules layernorm", "--fp8-format"),
        _ENGINE_RECIPES,
        "Delayed scaling does not support moe_act and layernorm recompute for fp8.",
    ),
    Rule(
        (_SAVED,),
        "--recompute-granularity full",
        "distributed recompute activations is only application to full recompute granularity",
    ),
    Rule((_SAVED, f"{_TP} 1"), "", "can distribute recomputed activations only across tensor model parallel groups"),
    Rule(
        (_SAVED, "--sequence-parallel"),
        "",
        "distribute_saved_activations must be false when sequence parallel is enabled",
    ),
    # Exchanges
    Rule(
        ("--cp-comm-type a2a+p2p",),
        "--hierarchical-context-parallel-sizes",
        "--hierarchical-context-parallel-sizes must be set when a2a+p2p is used in cp comm",
    ),
    Rule(
        ("--hybrid-context-parallel",),
        "--calculate-per-token-loss",
        "Hybrid context parallelism must be used with --calculate-per-token-loss",
    ),
    Rule(
        ("--hybrid-context-parallel",), f"{_PP} 1", "Hybrid context parallelism not supported with pipeline parallelism"
    ),
    Rule((_FLUSHED,), _CHUNKS, "only compatible with overlap_p2p_comm but not batch_p2p_comm."),
    Rule((_FLUSHED, "--no-overlap-p2p-communication"), "", "only compatible with overlap_p2p_comm"),
    Rule(
        ("--overlap-param-gather",),
        "--overlap-grad-reduce",
        "Must use --overlap-param-gather with --overlap-grad-reduce",
    ),
    Rule(
        ("--overlap-param-gather",),
        "--use-distributed-optimizer",
        "--overlap-param-gather only supported with distributed optimizer",
    ),
    Rule((_AT_STEP,), "--overlap-param-gather", f"Must use {_AT_STEP} with --overlap-param-gather"),
    Rule((_AT_STEP,), _CHUNKS, f"{_AT_STEP} only supported with interleaved pipeline parallelism"),
    Rule((_AT_STEP,), "--ckpt-format torch", f"{_AT_STEP} not supported with distributed checkpointing yet"),
    Rule(
        ("--tp-comm-overlap",),
        "--sequence-parallel",
        "Tensor parallel communication/GEMM overlap can happen only when sequence parallelism is enabled",
    ),
    Rule(
        ("--tp-comm-overlap", f"{_TP} 1"),
        "",
        "Disabling sequence parallelism because tensor model parallelism is disabled",
    ),
    # Stages
    Rule(
        (
            "--decoder-first-pipeline-num-layers|--decoder-last-pipeline-num-layers",
            "--account-for-embedding-in-pipeline-split|--account-for-loss-in-pipeline-split",
        ),
        "",
        "num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage cannot be set at the same time with "
        "account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split",
    ),
    Rule(
        ("--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage"),
        "",
        "No more than one of the following arguments can be set at the same time",
    ),
    Rule(
        ("--no-overlap-p2p-communication", f"{_PP} 2", _CHUNKS),
        "",
        "pipeline-model-parallel size should be greater than 2 to avoid having multiple p2p sends and recvs between "
        "same 2 ranks per communication batch",
    ),
    Rule((_DEFERRED, f"{_PP} 1"), "", "Cannot defer embedding wgrad compute when pipeline model parallel is not used"),
    Rule(
        (_DEFERRED, "--no-gradient-accumulation-fusion"),
        "",
        "Cannot defer embedding wgrad compute when gradient accumulation fusion is not used",
    ),
)
_OF_ALL = tuple(its for its in _RULES if not its.of_layouts)

type Given = Sequence[tuple[str, list[str] | None]]  # flags with their values


def together_problem(given: Given) -> str:
    """Return what is wrong with flags together in whatever layout; "" if nothing is."""
    values = dict(given)
    return _problem(_OF_ALL, _facts(values)) or _numbers_problem(values)


def whole_problem(given: Given, chunks: int, rules: Sequence[Rule] = _RULES) -> str:
    """Return what is wrong with all flags of a training together; "" if nothing is.

    Args:
        chunks: number of virtual stages of a rank.
        rules: those to look at.
    """
    values = {_TP: ["1"], _PP: ["1"]} | dict(given)
    values.setdefault(_EXPERT_TP, values[_TP])
    return _problem(rules, _facts(values) | ({_CHUNKS} if chunks > 1 else set()))


def open_rules(given: Given) -> tuple[Rule, ...]:
    """Return the rules that some layout may break of a training that has these flags beside its layout's."""
    facts = _facts(dict(given))
    return tuple(its for its in _RULES if its.may_break(facts))


def ranks_problem(given: Given, its: Parallel) -> str:
    """Return what Megatron expects of a layout's numbers of ranks for other flags; "" if it has that."""
    values = dict(given)
    tiers = _sizes(values, _TIERED)
    if tiers and prod(tiers) != its.cp:
        return f"--context-parallel-size is the product of {_TIERED}"
    for instances in _sizes(values, _INSTANCES):
        if instances < 1 or its.replicas % instances or its.expert_replicas % instances:
            return f"{_INSTANCES} divides the ranks with the same weights, of experts too"
    if STAGES_FIRST in values and its.pp > 1 and its.expert_width * its.ep != its.tp * its.cp:
        return (
            f"with {STAGES_FIRST} and several stages, --expert-tensor-parallel-size * --expert-model-parallel-size is "
            "--tensor-model-parallel-size * --context-parallel-size"
        )
    micro, batch = _sizes(values, "--eval-micro-batch-size"), _sizes(values, "--eval-global-batch-size")
    micro, batch = micro or [its.microbatch], batch or [its.global_batch]
    if micro[0] < 1 or batch[0] % (micro[0] * its.dp):
        return "--eval-micro-batch-size (--micro-batch-size) times the replicas divides --eval-global-batch-size"
    return ""


def _numbers_problem(values: Mapping[str, list[str] | None]) -> str:
    """Return what is wrong with numbers beside one another in whatever layout; "" if nothing is."""
    kinds, coefficients = (values.get(f"--moe-{its}") or [] for its in ("router-load-balancing-type", "aux-loss-coeff"))
    if len(kinds) > 1 and len(coefficients) != len(kinds):
        return (
            f"--moe-aux-loss-coeff has {len(coefficients)} values; expected {len(kinds)}, as "
            "--moe-router-load-balancing-type has"
        )
    (experts, groups, chosen) = (
        sum(_sizes(values, its)) for its in ("--num-experts", "--moe-router-num-groups", "--moe-router-group-topk")
    )
    if chosen and (groups < 1 or experts % groups or chosen > groups):
        return (
            f"--moe-router-num-groups is {groups}; expected a divisor of --num-experts, {experts}, and at least "
            f"--moe-router-group-topk, {chosen}"
        )
    return ""


def _sizes(values: Mapping[str, list[str] | None], flag: str) -> list[int]:
    """Return the whole numbers that a flag is given."""
    return [int(its) for its in values.get(flag) or ()]


def _facts(values: Mapping[str, list[str] | None]) -> set[str]:
    found = {*values, *(f"{flag} {value}" for flag, its in values.items() for value in its or ())}
    if "--recompute-modules" not in values:
        found.add("--recompute-modules core_attn")  # Megatron's default
    for kind in ("attention", "hidden"):
        if float((values.get(f"--{kind}-dropout") or ["0.1"])[0]):
            found.add(_DROPOUT.format(kind))
    if "--num-experts" not in values or re.search(r"\b0\b", " ".join(values.get("--moe-layer-freq") or ())):
        found.add(_DENSE)
    parts = values.get("--cuda-graph-modules") or values.get("--cuda-graph-scope") or ["full"]
    whole = not {"full", "full_iteration"}.isdisjoint(parts)
    graphed = (values.get("--cuda-graph-impl") or ["none"])[0] != "none"
    return found | {_GRAPHS.format(its) for its in ("attn", "mlp", "moe") if graphed and (whole or its in parts)}


def _problem(rules: Sequence[Rule], facts: Collection[str]) -> str:
    return next(filter(None, (its.problem(facts) for its in rules)), "")

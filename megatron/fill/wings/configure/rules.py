"""Flags that Megatron refuses together, or one without another; of a whole command, and of a search's layouts.

As in Megatron-core 0.19: ``validate_args`` and ``core_transformer_config_from_args`` of ``training``, the checks of
``TransformerConfig``, ``ModelParallelConfig``, ``OptimizerConfig`` and ``initialize_model_parallel``, and what experts
raise in a pass.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from megatron.fill.wings.mainjob.parallel import Parallel

_TP, _EXPERT_TP = "--tensor-model-parallel-size", "--expert-tensor-parallel-size"
_PP = "--pipeline-model-parallel-size"
# Facts that several flags may tell, or that hold where none says otherwise.
_CHUNKS, _DENSE = "virtual stages", "layers without experts"
_GRAPHS = "CUDA graphs of "  # attn, mlp or moe, alone or in one with the whole layer
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
_SENDERS = "--moe-token-dispatcher-type alltoall|--moe-token-dispatcher-type flex"
_WHOLE_LOOP = "|".join(f"--cuda-graph-{its} full_iteration" for its in ("impl", "modules", "scope"))
_GRAPHED = "--cuda-graph-impl local|--cuda-graph-impl transformer_engine"
_ATTENTION_PART, _MLP_PART, _MOE_PART, _ROUTER_PART, _PREPROCESS_PART = (
    f"--cuda-graph-modules {its}|--cuda-graph-scope {its}"
    for its in ("attn", "mlp", "moe", "moe_router", "moe_preprocess")
)
_BERT = "--bert-no-binary-head|--tokenizer-type BertWordPieceLowerCase|--tokenizer-type BertWordPieceCase"
_OFFSET = "--glu-linear-offset other than 0"
_TIERED = "--hierarchical-context-parallel-sizes"
_INSTANCES = "--num-distributed-optimizer-instances"
STAGES_FIRST = "--use-tp-pp-dp-mapping"
_TABLE = f"""
--batch-size
    no longer valid, use --micro-batch-size instead
--warmup
    no longer valid, use --lr-warmup-fraction instead
--model-parallel-size
    no longer valid, use --tensor-model-parallel-size instead
--checkpoint-activations
    no longer valid, use --recompute-activations instead
--bf16 AND --fp16
--num-query-groups WITHOUT --group-query-attention
--multi-latent-attention AND --group-query-attention
    Group query attention is mutually exclusive with multi latent attention.
--squared-relu AND --swiglu
--quick-geglu AND --swiglu
--quick-geglu AND {_DENSE} WITHOUT --disable-bias-linear|--no-bias-gelu-fusion
    Only support fusion of gelu and swiglu
--squared-relu WITHOUT --disable-bias-linear|--no-bias-gelu-fusion
    When bias_activation_fusion is True, activation function should be either gelu, swiglu, or quick_geglu
--attention-backend local WITHOUT --spec local
    --attention-backend local is only supported with --spec local
--spec local WITHOUT {_BERT}
    not enough values to unpack (expected 2, got 1); only BERT's script knows local
--encoder-num-layers AND --num-layers
    cannot have both num-layers and encoder-num-layers specified
--encoder-seq-length AND --seq-length
{_OFFSET} AND --swiglu WITHOUT --no-bias-swiglu-fusion
    When bias_activation_fusion is True and glu_linear_offset is non-zero, activation function must be quick_gelu.
{_OFFSET} WITHOUT --quick-geglu|--swiglu|--no-bias-gelu-fusion|--disable-bias-linear
    When bias_activation_fusion is True and glu_linear_offset is non-zero, activation function must be quick_gelu.
--mtp-num-layers WITHOUT --position-embedding-type rope|--position-embedding-type none
    The supported position embedding types are rope and none.
--no-position-embedding WITHOUT --position-embedding-type rope|--use-rotary-position-embeddings
    --no-position-embedding is deprecated, use --position-embedding-type
--position-embedding-type mrope WITHOUT --mrope-section|--use-rotary-position-embeddings
    --mrope-section should be set when using --position-embedding-type mrope.
--rope-type yarn WITHOUT --multi-latent-attention
    Common attention only support rope_type="rope"
--multi-latent-attention AND --rotary-interleaved
    rotary_interleaved does not work with multi_latent_attention.
--fp16-lm-cross-entropy WITHOUT --fp16
    lm cross entropy in fp16 only support in fp16 mode.
--fp32-residual-connection WITHOUT --bf16|--fp16
    residual connection in fp32 only supported when using fp16 or bf16.
--bf16 AND --accumulate-allreduce-grads-in-fp32 AND --main-grads-dtype bf16
    --main-grads-dtype can only be fp32 when --accumulate-allreduce-grads-in-fp32 is set
--cross-entropy-loss-fusion AND --cross-entropy-fusion-impl te
    Transformer Engine cross entropy loss fusion is disabled due to stability issues.
--fp8-format AND --fp8-recipe custom WITHOUT --fp8-quantizer-factory
    fp8_quantizer_factory must be provided when fp8_recipe is 'custom'.
--reuse-grad-buf-for-mxfp8-param-ag WITHOUT --fp8-param-gather
    Reuse grad buffer only when keeping params in MXFP8.
--transformer-impl inference_optimized WITHOUT --normalization RMSNorm
--transformer-impl inference_optimized WITHOUT --disable-bias-linear
--fused-residual-rmsnorm WITHOUT --normalization RMSNorm
    fused_residual_rmsnorm is only supported when normalization is RMSNorm.
--mla-down-proj-fusion WITHOUT --multi-latent-attention
    --mla-down-proj-fusion requires --multi-latent-attention
--batch-invariant-mode WITHOUT --attention-backend flash
    Batch invariant mode only supports FlashAttention (--attention-backend flash)
--use-precision-aware-optimizer WITHOUT --use-distributed-optimizer
    --use-precision-aware-optimizer only supported with distributed optimizer
--main-grads-dtype bf16|--main-grads-dtype fp16|--main-grads-dtype fp8 WITHOUT --use-precision-aware-optimizer
    main_grads_dtype can only be fp32 when not using precision-aware optimizer
--main-params-dtype bf16|--main-params-dtype fp16|--main-params-dtype fp8 WITHOUT --use-precision-aware-optimizer
    main_params_dtype can only be fp32 when not using precision-aware optimizer
--exp-avg-dtype bf16|--exp-avg-dtype fp16|--exp-avg-dtype fp8 WITHOUT --use-precision-aware-optimizer
    exp_avg_dtype can only be fp32 when not using precision-aware optimizer
--exp-avg-sq-dtype bf16|--exp-avg-sq-dtype fp16|--exp-avg-sq-dtype fp8 WITHOUT --use-precision-aware-optimizer
    exp_avg_sq_dtype can only be fp32 when not using precision-aware optimizer
--mock-data AND --data-path|--train-data-path|--valid-data-path|--test-data-path
    A single data source must be provided in training mode
--save WITHOUT --save-interval|--persistent-save-interval
--ckpt-format torch_dcp|--ckpt-format fsdp_dtensor
    it is only tested with FSDP.
--train-iters AND --train-samples
    expected iteration-based training
--train-iters AND --lr-decay-samples
    expected iteration-based training
--train-iters AND --lr-warmup-samples
    expected iteration-based training
--train-samples AND --lr-decay-iters
    expected sample-based training
--train-samples AND --lr-warmup-iters
    expected sample-based training
--lr-warmup-fraction AND --lr-warmup-iters|--lr-warmup-samples
    can only specify one of the two
--weight-decay-incr-style linear|--weight-decay-incr-style cosine WITHOUT --start-weight-decay
--weight-decay-incr-style linear|--weight-decay-incr-style cosine WITHOUT --end-weight-decay
--deterministic-mode AND --cross-entropy-loss-fusion
    requires: cross_entropy_loss_fusion=False
--deterministic-mode AND --tp-comm-overlap
    requires: tp_comm_overlap=False
--fp8-param-gather WITHOUT --fp8-format
--fp8-output-proj WITHOUT --fp8-format
--fp8-output-proj WITHOUT --fp8-recipe mxfp8
    fp8_output_proj requires fp8_recipe='mxfp8'
--fp8-format AND --first-last-layers-bf16 WITHOUT {_ENGINE_RECIPES}
    Delayed scaling does not support first / last layer in BF16.
{_WHOLE_LOOP} WITHOUT --no-check-for-nan-in-loss-and-grad|--fp16
    --no-check-for-nan-in-loss-and-grad should be set with --cuda-graph-impl=full_iteration for training.
--fp8-param-gather WITHOUT --use-distributed-optimizer
    --fp8-param-gather only supported with distributed optimizer
# Experts
--num-experts WITHOUT --disable-bias-linear|--expert-tensor-parallel-size 1
    Bias in Moe is only supported when ETP==1
--num-experts AND --transformer-impl local WITHOUT --disable-bias-linear
    Output 0 of _ReduceFromModelParallelRegion is a view and is being modified inplace.
--num-experts AND --swiglu WITHOUT --disable-bias-linear|--no-bias-swiglu-fusion
    Bias is not supported for weighted swiglu fusion
--num-experts WITHOUT --disable-bias-linear|--no-bias-gelu-fusion|--swiglu|--quick-geglu
    Only support fusion of swiglu and quick_gelu
--num-experts AND --moe-grouped-gemm WITHOUT --disable-bias-linear|--no-bias-dropout-fusion
    bias_dropout_fusion is not supported in TEGroupedMLP when add_bias_linear=True
--moe-single-grouped-weight|--moe-single-grouped-bias WITHOUT --moe-grouped-gemm
    moe_single_grouped_weight and moe_single_grouped_bias require moe_grouped_gemm=True.
--moe-single-grouped-weight WITHOUT --use-transformer-engine-op-fuser
    moe_single_grouped_weight requires use_transformer_engine_op_fuser=True.
--moe-single-grouped-weight AND --fp8-format WITHOUT --fp8-recipe mxfp8
    moe_single_grouped_weight is currently supported with high-precision primary weights, fp8_recipe='mxfp8', or
    fp4_recipe='nvfp4'.
--moe-single-grouped-bias AND --disable-bias-linear
    moe_single_grouped_bias requires add_bias_linear=True.
--moe-ffn-hidden-size WITHOUT --num-experts
    moe_ffn_hidden_size is set but num_moe_experts is None.
--moe-router-group-topk WITHOUT --num-experts
--moe-router-padding-for-fp8|--moe-router-padding-for-quantization WITHOUT --fp8-format
    fp8/fp4 must be specified when moe_router_padding_for_quantization is True.
--moe-router-padding-for-fp8|--moe-router-padding-for-quantization WITHOUT {_SENDERS}
    allgather and alltoall_seq dispatcher does not support moe_router_padding_for_quantization.
--moe-flex-dispatcher-backend ncclep WITHOUT --moe-token-dispatcher-type flex
    moe_flex_dispatcher_backend='ncclep' requires moe_token_dispatcher_type='flex'.
--ep-overlap-early-attn-memory-release WITHOUT --overlap-moe-expert-parallel-comm
    overlap_moe_expert_parallel_comm must be enabled when enabling ep_overlap_early_attn_memory_release
--moe-router-topk 1 WITHOUT --moe-router-pre-softmax|{_NOT_SOFTMAX}|--moe-router-load-balancing-type sinkhorn
    Please use --moe-router-pre-softmax when topk is 1.
--moe-router-enable-expert-bias WITHOUT {_NOT_SOFTMAX}
    Expert bias for aux-loss-free routing only supports 'sigmoid' and 'sqrtsoftplus' score functions.
--moe-pad-expert-input-to-capacity WITHOUT --moe-expert-capacity-factor
    moe_expert_capacity_factor must be set to use moe_pad_expert_input_to_capacity
--overlap-moe-expert-parallel-comm WITHOUT {_SENDERS}
    overlap_moe_expert_parallel_comm is supported with alltoall/flex token dispatcher
--moe-shared-expert-intermediate-size AND --moe-shared-expert-overlap WITHOUT {_SENDERS}
    moe_shared_expert_overlap only works with alltoall or flex token dispatcher.
--moe-enable-deepep WITHOUT --moe-token-dispatcher-type flex
    DeepEP backend is only supported with flex token dispatcher.
--moe-token-dispatcher-type flex AND --moe-pad-expert-input-to-capacity WITHOUT \
--moe-flex-dispatcher-backend hybridep|--moe-flex-dispatcher-backend ncclep
    Flex token dispatcher with deepep backend does not support moe_pad_expert_input_to_capacity
--moe-expert-capacity-factor AND \
--moe-router-load-balancing-type sinkhorn|--moe-router-load-balancing-type quantile_balancing
    moe_expert_capacity_factor only works with aux_loss, seq_aux_loss, global_aux_loss or none load balancing
--moe-router-group-topk WITHOUT --moe-router-num-groups
    When using group limited routing, moe_router_num_groups must be specified.
--delay-wgrad-compute WITHOUT --overlap-moe-expert-parallel-comm
    overlap_moe_expert_parallel_comm must be enabled when enabling delay_wgrad_compute
--overlap-moe-expert-parallel-comm AND --moe-shared-expert-overlap
    disable moe_shared_expert_overlap when enabling overlap_moe_expert_parallel_comm
# CUDA graphs
--enable-cuda-graph|--external-cuda-graph AND {_GRAPHED}|--cuda-graph-impl full_iteration
    Do not use --enable-cuda-graph or --external-cuda-graph with --cuda-graph-impl.
{_GRAPHED} AND {_MOE_PART}|{_ROUTER_PART} WITHOUT --num-experts
    moe cuda graph is only supported for MoE.
--cuda-graph-impl full_iteration AND {_ATTENTION_PART}|{_MLP_PART}|{_MOE_PART}|{_ROUTER_PART}
    --cuda-graph-modules must be empty when --cuda-graph-impl=full_iteration.
{_GRAPHED} AND {_MLP_PART} AND --num-experts WITHOUT --moe-layer-freq
    mlp cuda graph is only supported for dense layers, but not found in the model.
{_GRAPHED} AND {_MOE_PART} AND {_ROUTER_PART}
    cuda_graph_modules must not contain both moe and moe_router.
{_GRAPHED} AND {_MOE_PART} WITHOUT --moe-pad-expert-input-to-capacity
    moe cuda graph is only supported with drop-padding MoE.
--cuda-graph-impl transformer_engine AND {_PREPROCESS_PART} WITHOUT {_ROUTER_PART}
    moe_preprocess cuda graph is only supported with moe_router cuda graph.
--cuda-graph-impl transformer_engine AND {_ROUTER_PART} AND {_SELECTIVE} AND --recompute-modules moe
    moe recompute is not supported with moe_router CUDA graph
{_GRAPHS}attn AND {_SELECTIVE} AND --recompute-modules core_attn AND --attention-dropout above 0
    attention dropout is not supported with graphed attention recomputation.
{_GRAPHS}mlp AND {_SELECTIVE} AND --recompute-modules mlp AND --hidden-dropout above 0
    hidden dropout is not supported with graphed MLP/MoE recomputation.
{_GRAPHS}moe AND {_SELECTIVE} AND --recompute-modules moe AND --hidden-dropout above 0
    hidden dropout is not supported with graphed MLP/MoE recomputation.
# Recomputation
--recompute-modules mlp AND {_SELECTIVE} AND {_DENSE} WITHOUT --disable-bias-linear
    the backward pass of an MLP that is computed again and has biases never ends
--recompute-granularity full AND {_GRAPHED}
    full recompute is only supported with full iteration CUDA graph.
{_SELECTIVE} AND --recompute-modules moe_act WITHOUT --moe-grouped-gemm
    moe_act in recompute_modules is only supported with moe_grouped_gemm.
{_SELECTIVE} AND --recompute-modules mla_up_proj WITHOUT --multi-latent-attention
    mla_up_proj in recompute_modules is only supported with multi_latent_attention.
{_SELECTIVE} AND --recompute-modules shared_experts AND --moe-shared-expert-overlap
    shared_experts recompute cannot work with --moe-shared-expert-overlap.
{_SELECTIVE} AND --recompute-modules moe_act|--recompute-modules layernorm AND --fp8-format WITHOUT {_ENGINE_RECIPES}
    Delayed scaling does not support moe_act and layernorm recompute for fp8.
--distribute-saved-activations WITHOUT --recompute-granularity full
    distributed recompute activations is only application to full recompute granularity
--distribute-saved-activations AND --tensor-model-parallel-size 1
    can distribute recomputed activations only across tensor model parallel groups
--distribute-saved-activations AND --sequence-parallel
    distribute_saved_activations must be false when sequence parallel is enabled
# Exchanges
--cp-comm-type a2a+p2p WITHOUT --hierarchical-context-parallel-sizes
    --hierarchical-context-parallel-sizes must be set when a2a+p2p is used in cp comm
--hybrid-context-parallel WITHOUT --calculate-per-token-loss
    Hybrid context parallelism must be used with --calculate-per-token-loss
--hybrid-context-parallel WITHOUT --pipeline-model-parallel-size 1
    Hybrid context parallelism not supported with pipeline parallelism
--overlap-p2p-communication-warmup-flush WITHOUT {_CHUNKS}
    only compatible with overlap_p2p_comm but not batch_p2p_comm.
--overlap-p2p-communication-warmup-flush AND --no-overlap-p2p-communication
    only compatible with overlap_p2p_comm
--overlap-param-gather WITHOUT --overlap-grad-reduce
    Must use --overlap-param-gather with --overlap-grad-reduce
--overlap-param-gather WITHOUT --use-distributed-optimizer
    --overlap-param-gather only supported with distributed optimizer
--overlap-param-gather-with-optimizer-step WITHOUT --overlap-param-gather
    Must use --overlap-param-gather-with-optimizer-step with --overlap-param-gather
--overlap-param-gather-with-optimizer-step WITHOUT {_CHUNKS}
    --overlap-param-gather-with-optimizer-step only supported with interleaved pipeline parallelism
--overlap-param-gather-with-optimizer-step WITHOUT --ckpt-format torch
    --overlap-param-gather-with-optimizer-step not supported with distributed checkpointing yet
--tp-comm-overlap WITHOUT --sequence-parallel
    Tensor parallel communication/GEMM overlap can happen only when sequence parallelism is enabled
--tp-comm-overlap AND --tensor-model-parallel-size 1
    Disabling sequence parallelism because tensor model parallelism is disabled
# Stages
--decoder-first-pipeline-num-layers|--decoder-last-pipeline-num-layers AND \
--account-for-embedding-in-pipeline-split|--account-for-loss-in-pipeline-split
    num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage cannot be set at the same time with
    account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split
--num-virtual-stages-per-pipeline-rank AND --num-layers-per-virtual-pipeline-stage
    No more than one of the following arguments can be set at the same time
--no-overlap-p2p-communication AND --pipeline-model-parallel-size 2 AND {_CHUNKS}
    pipeline-model-parallel size should be greater than 2 to avoid having multiple p2p sends and recvs between same
    2 ranks per communication batch
--defer-embedding-wgrad-compute AND --pipeline-model-parallel-size 1
    Cannot defer embedding wgrad compute when pipeline model parallel is not used
--defer-embedding-wgrad-compute AND --no-gradient-accumulation-fusion
    Cannot defer embedding wgrad compute when gradient accumulation fusion is not used
"""


def _read(table: str) -> Iterator[Rule]:
    """Yield the rules of a table: a line of facts each, with Megatron's reason indented below it."""
    for facts, reason in re.findall(r"^([^#\s].*)\n((?: .*\n)*)", table, re.MULTILINE):
        given, _, without = facts.partition(" WITHOUT ")
        yield Rule(tuple(given.split(" AND ")), without, " ".join(reason.split()))


_RULES = tuple(_read(_TABLE))
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
    rates, intervals = _numbers(values, "--lr"), _numbers(values, "--save-interval")
    for least in _numbers(values, "--min-lr") or [0.0]:
        if rates and least > rates[0]:
            return f"--lr is {rates[0]:g}; expected at least --min-lr, {least:g}"
    if "--save" in values and intervals and intervals[0] <= 0:
        return f"--save-interval is {intervals[0]:g}; expected a number above 0 with --save"
    return ""


def _sizes(values: Mapping[str, list[str] | None], flag: str) -> list[int]:
    """Return the whole numbers that a flag is given."""
    return [int(its) for its in values.get(flag) or ()]


def _numbers(values: Mapping[str, list[str] | None], flag: str) -> list[float]:
    return [float(its) for its in values.get(flag) or ()]


def _facts(values: Mapping[str, list[str] | None]) -> set[str]:
    found = {*values, *(f"{flag} {value}" for flag, its in values.items() for value in its or ())}
    if "--recompute-modules" not in values:
        found.add("--recompute-modules core_attn")  # Megatron's default
    for kind in ("attention", "hidden"):
        if float((values.get(f"--{kind}-dropout") or ["0.1"])[0]):
            found.add(f"--{kind}-dropout above 0")
    if any(_numbers(values, "--glu-linear-offset")):
        found.add(_OFFSET)
    if "--num-experts" not in values or re.search(r"\b0\b", " ".join(values.get("--moe-layer-freq") or ())):
        found.add(_DENSE)
    parts = values.get("--cuda-graph-modules") or values.get("--cuda-graph-scope") or ["full"]
    whole = not {"full", "full_iteration"}.isdisjoint(parts)
    graphed = (values.get("--cuda-graph-impl") or ["none"])[0] != "none"
    return found | {f"{_GRAPHS}{its}" for its in ("attn", "mlp", "moe") if graphed and (whole or its in parts)}


def _problem(rules: Sequence[Rule], facts: Collection[str]) -> str:
    return next(filter(None, (its.problem(facts) for its in rules)), "")

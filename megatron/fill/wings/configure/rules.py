"""Flags that Megatron refuses together, or one without another; of a whole command, and of a search's layouts.

As in Megatron-core 0.19: ``validate_args`` and ``core_transformer_config_from_args`` of ``training``, and the checks of
``TransformerConfig`` and ``ModelParallelConfig``.  What needs arithmetic is where its numbers are read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

_TP, _EXPERT_TP = "--tensor-model-parallel-size", "--expert-tensor-parallel-size"
_PP = "--pipeline-model-parallel-size"
_CHUNKS = "virtual stages"  # a fact that several flags may tell
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
    Rule(("--moe-ffn-hidden-size",), "--num-experts", "moe_ffn_hidden_size is set but num_moe_experts is None."),
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
    # Recomputation
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
    return _problem(_OF_ALL, _facts(dict(given)))


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


def _facts(values: Mapping[str, list[str] | None]) -> set[str]:
    return {*values, *(f"{flag} {value}" for flag, its in values.items() for value in its or ())}


def _problem(rules: Sequence[Rule], facts: Collection[str]) -> str:
    return next(filter(None, (its.problem(facts) for its in rules)), "")

"""Flags that Megatron refuses together; ``tests/patches/test_rules_upstream.py`` asks Megatron itself about them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from megatron.fill.errors import ConfigError
from megatron.fill.wings.configure.flags import check_whole, read_flags
from megatron.fill.wings.configure.layout import lay_out, replicas_last
from megatron.fill.wings.configure.pays import figures
from megatron.fill.wings.configure.rules import _RULES
from megatron.fill.wings.configure.search import Evaluator, search
from tests.wings.configure.test_configure import cluster, links

MODEL = (
    "--num-layers 8 --hidden-size 256 --num-attention-heads 8 --seq-length 256 --max-position-embeddings 256 "
    "--vocab-size 1000 --global-batch-size 16 --micro-batch-size 1"
)
_TWO, _CHUNKS = "--bf16 --pipeline-model-parallel-size 2", "--num-virtual-stages-per-pipeline-rank 2"
_WIDE = "--bf16 --tensor-model-parallel-size 2"
_EXPERTS = f"{_TWO} --num-experts 8 --disable-bias-linear"
_HIDDEN = f"{_EXPERTS} --overlap-moe-expert-parallel-comm --expert-model-parallel-size 2 {_CHUNKS}"
_SENT = "--moe-token-dispatcher-type alltoall"
_SHARED = f"{_SENT} --moe-shared-expert-intermediate-size 64 --moe-shared-expert-overlap"
_PADDED = f"{_EXPERTS} --moe-pad-expert-input-to-capacity --moe-expert-capacity-factor 1.0"
_SELECTIVE = "--recompute-granularity selective --recompute-modules"
_SAVED = "--distribute-saved-activations --recompute-granularity"
_FULL = "full --recompute-method uniform --recompute-num-layers 1"
_GATHER, _REDUCE, _DIVIDED = "--overlap-param-gather", "--overlap-grad-reduce", "--use-distributed-optimizer"
_PRECISE = f"--bf16 {_DIVIDED} --use-precision-aware-optimizer"
_OPTIMIZED, _GRAPHED = "--bf16 --transformer-impl inference_optimized", "--bf16 --cuda-graph-impl local"
_AT_STEP = f"{_TWO} {_DIVIDED} {_GATHER}-with-optimizer-step"
# Flags that are refused; what to add so that they are not, or what to leave out.  Megatron refuses the first ones in a
# pass alone.
IN_A_PASS = [
    ("--num-experts 8 --no-bias-gelu-fusion --transformer-impl local", "--disable-bias-linear"),
    ("--num-experts 8 --swiglu", "--no-bias-swiglu-fusion"),
    ("--num-experts 8", "--no-bias-gelu-fusion"),
    ("--num-experts 8 --moe-grouped-gemm --no-bias-gelu-fusion", "--no-bias-dropout-fusion"),
    (f"{_TWO} {_SELECTIVE} mlp", "--disable-bias-linear"),
    ("--quick-geglu", "--no-bias-gelu-fusion"),
    ("--quick-geglu --num-experts 8 --moe-layer-freq [0]+[1]*7", "--disable-bias-linear"),
]
CASES = [
    *IN_A_PASS,
    ("--bf16 --fp16", "-fp16"),
    ("--num-query-groups 2", "--group-query-attention"),
    ("--multi-latent-attention --group-query-attention", "-group-query-attention"),
    ("--squared-relu --disable-bias-linear --swiglu", "-swiglu"),
    ("--squared-relu", "--disable-bias-linear"),
    ("--squared-relu", "--no-bias-gelu-fusion"),
    ("--bf16 --attention-backend local", "-attention-backend local"),
    ("--quick-geglu --disable-bias-linear --swiglu", "-swiglu"),
    ("--spec local", "-spec local"),
    ("--encoder-num-layers 8", "-encoder-num-layers 8"),
    ("--encoder-seq-length 256", "-encoder-seq-length 256"),
    ("--lr 1e-4 --min-lr 1e-3", "-min-lr 1e-3"),
    ("--bf16 --save here --save-interval 0", "--save-interval 10"),
    ("--glu-linear-offset 1.0", "--no-bias-gelu-fusion"),
    ("--glu-linear-offset 1.0 --swiglu --no-bias-gelu-fusion", "--no-bias-swiglu-fusion"),
    (f"{_EXPERTS} --moe-single-grouped-weight --use-transformer-engine-op-fuser", "--moe-grouped-gemm"),
    (f"{_EXPERTS} --moe-single-grouped-weight --moe-grouped-gemm", "--use-transformer-engine-op-fuser"),
    (
        f"{_EXPERTS} --moe-single-grouped-weight --moe-grouped-gemm --use-transformer-engine-op-fuser "
        "--fp8-format hybrid",
        "--fp8-recipe mxfp8",
    ),
    (f"{_EXPERTS} --moe-single-grouped-bias --moe-grouped-gemm", "-moe-single-grouped-bias"),
    ("--mtp-num-layers 1", "--position-embedding-type rope"),
    ("--mtp-num-layers 1 --use-rotary-position-embeddings", "--position-embedding-type rope"),
    ("--batch-size 4", "-batch-size 4"),
    ("--warmup 4", "-warmup 4"),
    ("--model-parallel-size 2", "-model-parallel-size 2"),
    ("--checkpoint-activations", "-checkpoint-activations"),
    ("--no-position-embedding", "--position-embedding-type rope"),
    ("--position-embedding-type mrope", "--mrope-section 8 8 16"),
    ("--position-embedding-type rope --rope-type yarn", "--multi-latent-attention"),
    ("--multi-latent-attention --rotary-interleaved", "-rotary-interleaved"),
    ("--fp16-lm-cross-entropy", "--fp16"),
    ("--fp32-residual-connection", "--bf16"),
    (
        f"{_PRECISE} --main-grads-dtype bf16 --accumulate-allreduce-grads-in-fp32",
        "-accumulate-allreduce-grads-in-fp32",
    ),
    ("--bf16 --use-precision-aware-optimizer", _DIVIDED),
    *(
        (f"--bf16 {_DIVIDED} --{its}", "--use-precision-aware-optimizer")
        for its in ("main-grads-dtype bf16", "main-params-dtype fp16", "exp-avg-dtype fp8", "exp-avg-sq-dtype bf16")
    ),
    ("--bf16 --fp8-format hybrid --fp8-recipe custom", "--fp8-quantizer-factory here.factory"),
    (f"--bf16 --fp8-format hybrid {_DIVIDED} --reuse-grad-buf-for-mxfp8-param-ag", "--fp8-param-gather"),
    (f"{_OPTIMIZED} --disable-bias-linear", "--normalization RMSNorm"),
    (f"{_OPTIMIZED} --normalization RMSNorm", "--disable-bias-linear"),
    ("--bf16 --fused-residual-rmsnorm", "--normalization RMSNorm"),
    ("--bf16 --mla-down-proj-fusion", "--multi-latent-attention"),
    ("--bf16 --batch-invariant-mode", "-batch-invariant-mode"),
    ("--bf16 --mock-data --data-path here", "-data-path here"),
    ("--bf16 --save here", "--save-interval 10"),
    ("--bf16 --ckpt-format torch_dcp", "-ckpt-format torch_dcp"),
    ("--bf16 --train-iters 10 --lr-decay-samples 100", "-lr-decay-samples 100"),
    ("--bf16 --train-samples 100 --lr-decay-iters 10", "-lr-decay-iters 10"),
    ("--bf16 --train-iters 10 --lr-warmup-fraction 0.1 --lr-warmup-iters 1", "-lr-warmup-fraction 0.1"),
    ("--bf16 --weight-decay-incr-style linear --end-weight-decay 0.1", "--start-weight-decay 0.01"),
    ("--bf16 --weight-decay-incr-style cosine --start-weight-decay 0.1", "--end-weight-decay 0.2"),
    ("--cross-entropy-fusion-impl te --cross-entropy-loss-fusion", "-cross-entropy-loss-fusion"),
    ("--bf16 --deterministic-mode --cross-entropy-loss-fusion", "-cross-entropy-loss-fusion"),
    (f"{_WIDE} --sequence-parallel --deterministic-mode --tp-comm-overlap", "-tp-comm-overlap"),
    (f"--bf16 --fp8-param-gather {_DIVIDED}", "--fp8-format hybrid"),
    ("--bf16 --fp8-format hybrid --fp8-param-gather", _DIVIDED),
    ("--bf16 --fp8-recipe mxfp8 --fp8-output-proj", "--fp8-format hybrid"),
    ("--bf16 --fp8-format hybrid --fp8-output-proj", "--fp8-recipe mxfp8"),
    ("--bf16 --fp8-format hybrid --first-last-layers-bf16", "--fp8-recipe blockwise"),
    ("--bf16 --cuda-graph-impl full_iteration", "--no-check-for-nan-in-loss-and-grad"),
    ("--bf16 --disable-bias-linear --moe-ffn-hidden-size 512", "--num-experts 8"),
    (f"{_EXPERTS} --moe-shared-expert-intermediate-size 64 --moe-shared-expert-overlap", "-moe-shared-expert-overlap"),
    (f"{_EXPERTS} --moe-enable-deepep", "--moe-token-dispatcher-type flex"),
    (f"{_PADDED} --moe-token-dispatcher-type flex", "--moe-flex-dispatcher-backend hybridep"),
    (f"{_PADDED} --moe-router-load-balancing-type sinkhorn", "-moe-router-load-balancing-type sinkhorn"),
    (f"{_EXPERTS} --moe-router-group-topk 2", "--moe-router-num-groups 4"),
    (f"{_EXPERTS} --delay-wgrad-compute", "-delay-wgrad-compute"),
    (f"{_WIDE} --sequence-parallel --num-experts 8", "--disable-bias-linear"),
    (f"{_WIDE} --sequence-parallel --num-experts 8 --no-bias-gelu-fusion", "--expert-tensor-parallel-size 1"),
    (f"{_EXPERTS} {_SENT} --moe-router-padding-for-quantization", "--fp8-format hybrid"),
    (f"{_EXPERTS} --fp8-format hybrid --moe-router-padding-for-fp8", _SENT),
    (f"{_EXPERTS} --moe-flex-dispatcher-backend ncclep", "--moe-token-dispatcher-type flex"),
    (f"{_EXPERTS} --ep-overlap-early-attn-memory-release", "-ep-overlap-early-attn-memory-release"),
    (f"{_EXPERTS} --moe-router-group-topk 2 --moe-router-num-groups 3", "-moe-router-group-topk 2"),
    (f"{_EXPERTS} --moe-router-group-topk 5 --moe-router-num-groups 4", "-moe-router-group-topk 5"),
    ("--moe-router-group-topk 2 --moe-router-num-groups 4", "-moe-router-group-topk 2"),
    (f"{_EXPERTS} --moe-router-load-balancing-type aux_loss seq_aux_loss", "--moe-aux-loss-coeff 0.1 0.1"),
    (f"{_GRAPHED} --enable-cuda-graph", "-enable-cuda-graph"),
    (f"{_GRAPHED} --cuda-graph-modules moe_router", "-cuda-graph-modules moe_router"),
    (f"{_GRAPHED} --cuda-graph-scope moe moe_router {_PADDED[7:]}", "-cuda-graph-scope moe moe_router"),
    (f"{_EXPERTS} {_GRAPHED[7:]} --cuda-graph-modules mlp", "-cuda-graph-modules mlp"),
    (f"{_EXPERTS} {_GRAPHED[7:]} --cuda-graph-modules moe", "-cuda-graph-modules moe"),
    (
        f"{_EXPERTS} --cuda-graph-impl transformer_engine --cuda-graph-modules moe_preprocess",
        "-cuda-graph-modules moe_preprocess",
    ),
    (
        f"{_EXPERTS} --cuda-graph-impl transformer_engine --cuda-graph-modules moe_router attn {_SELECTIVE} moe",
        " moe_router",
    ),
    (
        "--bf16 --cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad --cuda-graph-modules attn",
        "-cuda-graph-modules attn",
    ),
    (f"{_GRAPHED} --recompute-activations", "--attention-dropout 0.0"),
    (f"{_GRAPHED} --recompute-activations", "--cuda-graph-modules mlp"),
    (f"{_GRAPHED} --disable-bias-linear --cuda-graph-modules mlp {_SELECTIVE} mlp", "--hidden-dropout 0"),
    (f"{_PADDED} {_GRAPHED[7:]} --cuda-graph-modules moe {_SELECTIVE} moe", "--hidden-dropout 0"),
    (f"{_EXPERTS} --moe-router-topk 1", "--moe-router-pre-softmax"),
    (f"{_EXPERTS} --moe-router-topk 1", "--moe-router-score-function sigmoid"),
    (f"{_EXPERTS} --moe-router-topk 1", "--moe-router-load-balancing-type sinkhorn"),
    (f"{_EXPERTS} --moe-router-enable-expert-bias", "--moe-router-score-function sigmoid"),
    (f"{_EXPERTS} --moe-pad-expert-input-to-capacity", "--moe-expert-capacity-factor 1.0"),
    (_HIDDEN, "--moe-token-dispatcher-type alltoall"),
    (f"{_HIDDEN} {_SHARED}", "-moe-shared-expert-overlap"),
    (f"{_EXPERTS} {_SELECTIVE} moe_act", "--moe-grouped-gemm"),
    (f"{_EXPERTS} --recompute-activations --recompute-modules moe_act", "--moe-grouped-gemm"),
    (f"{_TWO} {_SELECTIVE} mla_up_proj", "--multi-latent-attention"),
    (f"{_EXPERTS} {_SHARED} {_SELECTIVE} shared_experts", "-moe-shared-expert-overlap"),
    (f"{_TWO} {_SELECTIVE} layernorm --fp8-format hybrid", "--fp8-recipe tensorwise"),
    (f"{_WIDE} {_SAVED} selective", "-distribute-saved-activations"),
    (f"--bf16 {_SAVED} {_FULL}", "--tensor-model-parallel-size 2"),
    (f"{_WIDE} {_SAVED} {_FULL} --sequence-parallel", "-sequence-parallel"),
    (f"--bf16 --recompute-granularity {_FULL} --cuda-graph-impl local", "-cuda-graph-impl local"),
    ("--context-parallel-size 2 --cp-comm-type a2a+p2p", "--hierarchical-context-parallel-sizes 2 1"),
    ("--bf16 --hybrid-context-parallel", "--calculate-per-token-loss"),
    (f"{_TWO} --hybrid-context-parallel --calculate-per-token-loss", "-hybrid-context-parallel"),
    (f"{_TWO} --overlap-p2p-communication-warmup-flush", _CHUNKS),
    (
        f"--bf16 --pipeline-model-parallel-size 4 {_CHUNKS} --overlap-p2p-communication-warmup-flush "
        "--no-overlap-p2p-communication",
        "-no-overlap-p2p-communication",
    ),
    (f"--bf16 {_GATHER} {_DIVIDED}", _REDUCE),
    (f"--bf16 {_GATHER} {_REDUCE}", _DIVIDED),
    (f"{_AT_STEP} {_CHUNKS} --ckpt-format torch", f"{_GATHER} {_REDUCE}"),
    (f"{_AT_STEP} {_GATHER} {_REDUCE} {_CHUNKS}", "--ckpt-format torch"),
    (f"{_AT_STEP} {_GATHER} {_REDUCE} --ckpt-format torch", _CHUNKS),
    (f"{_WIDE} --tp-comm-overlap", "--sequence-parallel"),
    ("--bf16 --tp-comm-overlap --sequence-parallel", "--tensor-model-parallel-size 2"),
    (
        "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 2 --account-for-loss-in-pipeline-split",
        "-account-for-loss-in-pipeline-split",
    ),
    (
        "--pipeline-model-parallel-size 4 --decoder-last-pipeline-num-layers 2 "
        "--account-for-embedding-in-pipeline-split",
        "-account-for-embedding-in-pipeline-split",
    ),
    (f"{_TWO} --num-layers-per-virtual-pipeline-stage 2 {_CHUNKS}", f"-{_CHUNKS[2:]}"),
    (f"{_TWO} {_CHUNKS} --no-overlap-p2p-communication", "-no-overlap-p2p-communication"),
    (f"{_TWO} {_CHUNKS} --no-overlap-p2p-communication", "--pipeline-model-parallel-size 4"),
    ("--bf16 --defer-embedding-wgrad-compute", "--pipeline-model-parallel-size 2"),
    (f"{_TWO} --defer-embedding-wgrad-compute --no-gradient-accumulation-fusion", "-no-gradient-accumulation-fusion"),
]


# Flags whose layout is refused, on eight GPUs; what Megatron says of it, or "" where it does not say it by its parser.
RANKS = [
    ("--hierarchical-context-parallel-sizes 2 2 --context-parallel-size 2", "is the product of"),
    ("--hierarchical-context-parallel-sizes 2 2", "is the product of"),
    ("--num-distributed-optimizer-instances 3", "divides the ranks with the same weights"),
    (f"{_EXPERTS} --expert-model-parallel-size 4 --num-distributed-optimizer-instances 2", "of experts too"),
    ("--eval-micro-batch-size 3", "divides --eval-global-batch-size"),
    ("--eval-global-batch-size 6 --tensor-model-parallel-size 2", "divides --eval-global-batch-size"),
]
# Flags of layouts that Megatron starts on eight GPUs, and what they stand for.
STARTED = [
    ("--pipeline-model-parallel-layout Et*8L", 1),
    ("--num-layers-per-virtual-pipeline-stage 8", 1),
    ("--decoder-first-pipeline-num-layers 8", 1),
    (f"{_TWO} --recompute-modules mlp", 2),
    (f"{_TWO} --moe-token-dispatcher-type flex", 2),
    (f"{_TWO} --num-distributed-optimizer-instances 2 --eval-micro-batch-size 2 --eval-global-batch-size 8", 2),
    ("--hierarchical-context-parallel-sizes 2 1 --context-parallel-size 2", 1),
    ("--cuda-graph-impl local --cuda-graph-modules mlp --recompute-activations", 1),
    ("--lr 1e-4 --min-lr 1e-4 --save-interval 0 --glu-linear-offset 0", 1),
    ("--glu-linear-offset 1.0 --quick-geglu --no-bias-gelu-fusion", 1),
]


def mended(flags: str, mend: str) -> str:
    """The flags with the others, or without the one that the mend names with one hyphen, or with a space a value."""
    return f"{flags} {mend}" if mend.startswith("--") else flags.replace(mend if mend[0] == " " else f"-{mend}", "")


def refusal(flags: str) -> str:
    """What ``pipefill pays`` says of flags before it weighs them; "" if it takes them."""
    tokens = f"{MODEL} {flags}".split()
    try:
        check_whole(read_flags(tokens), tokens)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("flags", "mend"), CASES)
def test_flags_that_megatron_refuses_together_are_refused(flags, mend):
    assert "; expected " in refusal(flags)
    assert not refusal(mended(flags, mend))


def test_each_of_megatrons_reasons_has_a_case():
    said = {refusal(flags) for flags, _ in CASES}
    assert [its.reason for its in _RULES if not any(its.reason in one for one in said)] == []


@pytest.mark.parametrize(("flags", "reason"), RANKS)
def test_numbers_of_ranks_that_megatron_refuses_are_refused(flags, reason):
    tokens = f"{MODEL} {flags}".split()
    with pytest.raises(ConfigError, match=reason):
        figures(read_flags(tokens), 8, "h100-80gb", "dgx-h100")


@pytest.mark.parametrize(("flags", "stages"), STARTED)
def test_layouts_that_megatron_starts_are_taken(flags, stages):
    assert not refusal(flags)
    found = figures(read_flags(f"{MODEL} {flags}".split()), 8, "h100-80gb", "dgx-h100")
    assert found.proposal.parallel.pp == stages


def test_a_layout_in_letters_has_no_others_and_m_in_the_last_stage_of_a_rank():
    flags = "--mtp-num-layers 1 --position-embedding-type rope --pipeline-model-parallel-layout"
    assert not refusal(f"{flags} Etttt|tttt|m|L --pipeline-model-parallel-size 4")
    assert "has m in stage 3 of 6: expected it in a rank's last virtual stage, one of the last 2" in refusal(
        f"{flags} Etttt|tttt|m|||L --pipeline-model-parallel-size 2"
    )
    with pytest.raises(ConfigError, match="m in one of them"):
        read_flags([*MODEL.split(), *flags.split(), "Etttt|ttttm|mL"])
    with pytest.raises(ConfigError, match="expected E first"):
        read_flags([*MODEL.split(), "--pipeline-model-parallel-layout", "Et*4 |t*4L"])
    assert not refusal(f'{_TWO} --pipeline-model-parallel-layout "Et*4|t*4L"')  # quoted as for a shell


def test_layouts_that_megatron_refuses_are_not_proposed():
    """Experts with biases are not divided by tensor parallelism, and no other layouts are left out for it."""
    experts, its = f"{MODEL} --bf16 --num-experts 8 --no-bias-gelu-fusion", cluster(2, 4)
    rows = [
        search(Evaluator(training, its, links(its)), 1000).proposals
        for training in (read_flags([*experts.split(), *more]) for more in ([], ["--disable-bias-linear"]))
    ]
    widths = [Counter(one.parallel.tp for one in found) for found in rows]
    assert set(widths[0]) == {1}
    assert widths[1][1] == widths[0][1]
    assert {2, 4} < set(widths[1])
    fixed = read_flags([*experts.split(), "--tensor-model-parallel-size", "2"])
    with pytest.raises(ConfigError, match=r"expected .* \(Megatron: Bias in Moe is only supported when ETP==1\)"):
        search(Evaluator(fixed, its, links(its)))


def test_with_stages_numbered_before_replicas_a_node_has_a_pipeline():
    flags = f"{MODEL} --bf16 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping"
    cluster_ = cluster(2, 4)
    (one,) = search(Evaluator(read_flags(flags.split()), cluster_, links(cluster_)), 1).proposals
    its = replace(one.parallel, chunks=1)
    assert replicas_last(its) == [0, 1, 4, 5, 2, 3, 6, 7]
    there, usual = (lay_out(links(cluster_), its, order) for order in (replicas_last(its), None))
    assert there.replicas[0][0][0].time_s(1e9) < usual.replicas[0][0][0].time_s(1e9)
    assert there.stages[0].replicas.time_s(1e9) > usual.stages[0].replicas.time_s(1e9)
    assert one.order == tuple(range(8))  # of the cluster's ranks, which Megatron numbers so itself
    usually = search(Evaluator(read_flags(flags.split()[:-1]), cluster_, links(cluster_)), 1).proposals[0]
    assert one.iteration_s != usually.iteration_s


def test_stages_before_replicas_take_as_many_ranks_of_experts_as_of_attention():
    its = cluster(2, 4)
    flags = f"{MODEL} --bf16 --use-tp-pp-dp-mapping --pipeline-model-parallel-size 2 --context-parallel-size 2".split()
    with pytest.raises(ConfigError, match="with --use-tp-pp-dp-mapping and several stages"):
        search(Evaluator(read_flags(flags), its, links(its)))
    assert search(Evaluator(read_flags([*flags, "--expert-tensor-parallel-size", "2"]), its, links(its))).rows


def test_selective_recomputation_is_left_out_where_megatron_refuses_its_modules():
    its = cluster(2, 4)
    flags = f"{MODEL} --bf16 --num-experts 8 --disable-bias-linear --recompute-modules moe_act".split()
    evaluator = Evaluator(read_flags(flags), its, links(its))
    (one,) = search(evaluator, 1).proposals
    assert not evaluator.refused(one.parallel)
    with pytest.raises(ConfigError, match="only supported with moe_grouped_gemm"):
        search(Evaluator(read_flags([*flags, "--recompute-granularity", "selective"]), its, links(its)))


def test_when_nothing_fits_the_smallest_is_one_that_megatron_starts():
    its = cluster(2, 4, memory="2100MiB")
    flags = f"{MODEL} --bf16 --num-experts 8 --disable-bias-linear --recompute-modules moe_act"
    wide = flags.replace("--hidden-size 256", "--hidden-size 8192").split()
    with pytest.raises(ConfigError, match="that Megatron would start, the smallest needs"):
        search(Evaluator(read_flags(wide), its, links(its)))

"""Flags that Megatron refuses together; ``tests/patches/test_rules_upstream.py`` asks Megatron itself about them."""

from __future__ import annotations

from collections import Counter

import pytest

from megatron.fill.errors import ConfigError
from megatron.fill.wings.configure.flags import check_whole, read_flags
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
_SHARED = "--moe-token-dispatcher-type alltoall --moe-shared-expert-intermediate-size 64 --moe-shared-expert-overlap"
_PADDED = f"{_EXPERTS} --moe-pad-expert-input-to-capacity --moe-expert-capacity-factor 1.0"
_SELECTIVE = "--recompute-granularity selective --recompute-modules"
_SAVED = "--distribute-saved-activations --recompute-granularity"
_FULL = "full --recompute-method uniform --recompute-num-layers 1"
_GATHER, _REDUCE, _DIVIDED = "--overlap-param-gather", "--overlap-grad-reduce", "--use-distributed-optimizer"
_AT_STEP = f"{_TWO} {_DIVIDED} {_GATHER}-with-optimizer-step"
# Flags that are refused; what to add so that they are not, or what to leave out.
CASES = [
    ("--bf16 --fp16", "-fp16"),
    ("--num-query-groups 2", "--group-query-attention"),
    ("--multi-latent-attention --group-query-attention", "-group-query-attention"),
    ("--squared-relu --disable-bias-linear --swiglu", "-swiglu"),
    ("--squared-relu", "--disable-bias-linear"),
    ("--squared-relu", "--no-bias-gelu-fusion"),
    ("--bf16 --attention-backend local", "--spec local"),
    ("--quick-geglu --disable-bias-linear --swiglu", "-swiglu"),
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
    ("--bf16 --main-grads-dtype bf16 --accumulate-allreduce-grads-in-fp32", "-accumulate-allreduce-grads-in-fp32"),
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
    (f"{_WIDE} --sequence-parallel --num-experts 8", "--expert-tensor-parallel-size 1"),
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


def mended(flags: str, mend: str) -> str:
    """The flags with the others, or without the one that the mend names with one hyphen."""
    return f"{flags} {mend}" if mend.startswith("--") else flags.replace(f"-{mend}", "")


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
    assert all(any(its.reason in one for one in said) for its in _RULES)


def test_layouts_that_megatron_refuses_are_not_proposed():
    """Experts with biases are not divided by tensor parallelism, and no other layouts are left out for it."""
    experts, its = f"{MODEL} --bf16 --num-experts 8", cluster(2, 4)
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

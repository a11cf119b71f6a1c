"""What must hold between predictions: more work takes no less time, more of it in flight no less memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron.fill.errors import ConfigError
from megatron.fill.wings.configure.cluster import Cluster
from megatron.fill.wings.configure.flags import read_flags
from megatron.fill.wings.configure.latency import timeline
from megatron.fill.wings.configure.search import Evaluator, search
from megatron.fill.wings.configure.space import layouts, padded
from megatron.fill.wings.mainjob.hardware import GPUS, NETWORKS
from megatron.fill.wings.mainjob.parallel import Parallel, Recompute
from megatron.fill.wings.mainjob.roofline import launches

_SWITCHES = (
    "--swiglu",
    "--untie-embeddings-and-output-weights",
    "--attention-dropout 0 --hidden-dropout 0",
    "--overlap-grad-reduce",
    "--attention-backend unfused",
    "--num-experts 8 --moe-grouped-gemm --disable-bias-linear",
    "--group-query-attention --num-query-groups 2",
)


@st.composite
def trainings(draw: st.DrawFn) -> tuple[dict[str, int], str, Cluster]:
    sizes = {
        "--num-layers": draw(st.sampled_from([8, 12, 24])),
        "--hidden-size": draw(st.sampled_from([1024, 4096, 8192])),
        "--num-attention-heads": draw(st.sampled_from([8, 32])),
        "--seq-length": draw(st.sampled_from([1024, 4096])),
        "--global-batch-size": draw(st.sampled_from([32, 128])),
    }
    more = " ".join(draw(st.lists(st.sampled_from(_SWITCHES), unique=True)))
    gpu, network = draw(st.sampled_from(sorted(GPUS))), draw(st.sampled_from(["dgx-a100", "dgx-h100", "p3dn.24xlarge"]))
    nodes = draw(st.sampled_from([1, 2]))
    cluster = Cluster(nodes=nodes, gpus_per_node=8, gpu=GPUS[gpu], network=NETWORKS[network])
    return sizes, f"--vocab-size 50257 --bf16 {more}", cluster


def evaluator(sizes: dict[str, int], others: str, cluster: Cluster) -> Evaluator:
    flags = [str(part) for pair in sizes.items() for part in pair]
    return Evaluator(read_flags([*flags, *others.split()]), cluster, cluster.links(Path()))


def peak_bytes(its: Evaluator, layout: Parallel) -> int:
    return max(one.total_bytes for one in its.held(layout)[0])


def period_ns(its: Evaluator, layout: Parallel) -> int:
    return timeline(its.iteration(layout)).period_ns


@settings(max_examples=30)
@given(trainings(), st.randoms(use_true_random=False))
def test_more_takes_no_less(training, random):
    sizes, others, cluster = training
    its = evaluator(*training)
    found = list(layouts(its.training, cluster.gpus, 8, Counter()))
    assume(found)
    layout = random.choice(found)
    held, interval = its.held(layout)
    peak, period = peak_bytes(its, layout), period_ns(its, layout)
    assert interval.low <= interval.shown <= interval.high
    assert its.least_bytes(layout) <= peak

    for name in ("--seq-length", "--hidden-size"):
        larger = evaluator(sizes | {name: 2 * sizes[name]}, others, cluster)
        assert period_ns(larger, layout) >= period, name
        assert peak_bytes(larger, layout) >= peak, name
    twice = evaluator(sizes | {"--global-batch-size": 2 * sizes["--global-batch-size"]}, others, cluster)
    assert period_ns(twice, replace(layout, global_batch=2 * layout.global_batch)) > period

    for kind in its.kinds[1:]:
        again = replace(layout, recompute=kind)
        assert period_ns(its, again) >= period, kind
        # of one layer, its input is kept besides what its backward pass computes again
        assert peak_bytes(its, again) <= peak * 1.01, kind

    wide = replace(layout, microbatch=2 * layout.microbatch, global_batch=2 * layout.global_batch)
    assert peak_bytes(its, wide) >= peak
    if layout.distributed_optimizer and layout.dp > 1 and layout.ep == 1:
        alone = its.held(replace(layout, dp=1, global_batch=layout.global_batch // layout.dp))[0]
        for many, one in zip(held, alone, strict=True):
            assert many.optimizer_bytes <= one.optimizer_bytes

    for flag in ("--overlap-grad-reduce", "--tp-comm-overlap"):
        assert period_ns(evaluator(sizes, f"{others} {flag}", cluster), layout) <= period, flag
    if cluster.gpu.capability >= 9:
        eight = evaluator(sizes, f"{others} --fp8-format hybrid", cluster)
        fewer, more = (launches(padded(one.training, layout.tp), layout) for one in (its, eight))
        # making 8-bit numbers may take longer than it gains, and so may launching what does it
        most = max(more[0] / fewer[0], more[1] / fewer[1])
        assert period_ns(eight, layout) <= period * max(1.01, most)


@settings(max_examples=8)
@given(trainings())
def test_what_is_proposed_fits(training):
    its = evaluator(*training)
    cluster = training[2]
    try:
        found = search(its, 5)
    except ConfigError:
        return  # nothing fits
    times = [one.iteration_s for one in found.proposals]
    assert times == sorted(times)
    for one in found.proposals:
        low, high = one.interval_bytes
        assert low <= one.peak_bytes <= high <= cluster.room_bytes
        if one.parallel.recompute is Recompute.FULL:
            assert not its.fits(its.least_bytes(replace(one.parallel, recompute=Recompute.NONE))) or (
                its.proposal(its.iteration(replace(one.parallel, recompute=Recompute.NONE))) is None
            )

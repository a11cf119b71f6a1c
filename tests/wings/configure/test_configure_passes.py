"""Passes as a short run measured them, and what the configurator makes of them."""

from __future__ import annotations

import random
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.fill.errors import ConfigError
from megatron.fill.pipeline.costs import PipelineCosts, StageCost
from megatron.fill.pipeline.schedule import Pass
from megatron.fill.pipeline.schedules import make_schedule
from megatron.fill.pipeline.timeline import Compiled, simulate
from megatron.fill.records.rank import rank_file, read_rank
from megatron.fill.records.segment import begin_segment
from megatron.fill.wings.configure.cluster import Cluster
from megatron.fill.wings.configure.flags import read_flags
from megatron.fill.wings.configure.latency import bound_ns, iteration, timeline
from megatron.fill.wings.configure.layout import lay_out
from megatron.fill.wings.configure.links import Links
from megatron.fill.wings.configure.passes import Both, Passes, Profile, load_passes
from megatron.fill.wings.configure.search import Evaluator, search
from megatron.fill.wings.mainjob.hardware import GPUS
from megatron.fill.wings.mainjob.memory import stage_parameters
from megatron.fill.wings.mainjob.model import ModelSpec
from megatron.fill.wings.mainjob.parallel import Parallel, Precision, Recompute
from tests.support.configuring import random_iteration
from tests.support.recorded_runs import MS, records
from tests.support.segments import write_rank

MODEL = ModelSpec(layers=8, hidden=64, heads=4, sequence=64, vocabulary=128)
FLAGS = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 100"
LAYER, NONE = Both(3 * MS, 5 * MS), Both(0, 0)
EMBEDDING_MS, OUTPUT_MS, STEP_MS = 1, 2, 4
_COST = {Pass.FORWARD: "forward_ns", Pass.BACKWARD: "backward_ns"}


def ran(
    folder: Path,
    flags: str = "",
    chunks: int = 2,
    microbatch: int = 1,
    slower: int = 1,
    first_layers: int = 4,
    fixed: Both = NONE,
    step_ns: int = 0,
    varying_ns: int = 0,
) -> Path:
    """The folder of a run of two stages whose passes took what the constants say, times ``slower``, and ``fixed``.

    Args:
        step_ns: what a step takes for each layer, beside ``STEP_MS``.
        varying_ns: by how much passes of every other micro-batch are longer than usual, and of the others shorter.
    """
    counts = [first_layers // chunks, (8 - first_layers) // chunks] * chunks
    passes = [
        StageCost(slower * layers * 3 * MS + int(fixed.forward_ns), slower * layers * 5 * MS + int(fixed.backward_ns))
        for layers in counts
    ]
    passes[0] = replace(passes[0], backward_ns=passes[0].backward_ns + EMBEDDING_MS * MS)
    passes[-1] = replace(passes[-1], forward_ns=passes[-1].forward_ns + OUTPUT_MS * MS)
    schedule = make_schedule("interleaved" if chunks > 1 else "1f1b", 2, 4, chunks)
    steps = tuple(STEP_MS * MS + step_ns * layers * chunks for layers in counts[:2])
    costs = PipelineCosts(tuple(passes), 0, (0, 0), steps)
    durations = [
        [
            getattr(passes[schedule.virtual_stage(rank, op)], _COST[op.kind])
            + (varying_ns if op.microbatch % 2 else -varying_ns)
            for op in row
        ]
        for rank, row in enumerate(schedule.order)
    ]
    line = Compiled(schedule, rendezvous=True).run(costs, durations)
    layout = f"--pipeline-model-parallel-size 2 --micro-batch-size {microbatch} --global-batch-size {4 * microbatch}"
    if chunks > 1:
        layout += f" --num-virtual-stages-per-pipeline-rank {chunks}"
    if first_layers != 4:
        layout += f" --decoder-first-pipeline-num-layers {first_layers}"
    command = f"pretrain_gpt.py {FLAGS} {layout} {flags} --fill-profile-only"
    segment = begin_segment(folder, shlex.join(command.split()), 2).segment
    for record in records(schedule, [line] * 6, [MS, MS]):
        write_rank(rank_file(segment.folder, record.info.rank), record)
    return folder


def training(extra: str = ""):
    return read_flags(f"{FLAGS} --global-batch-size 8 {extra}".split())


def test_a_run_with_virtual_stages_tells_layers_from_ends(tmp_path):
    (one,) = load_passes([ran(tmp_path / "a")], training()).profiles
    assert one.layer == LAYER
    assert one.first == Both(0, EMBEDDING_MS * MS)
    assert one.last == Both(OUTPUT_MS * MS, 0)
    assert (one.tp, one.microbatch) == (1, 1)
    assert one.step_s_per_parameter > 0


def test_virtual_stages_with_other_numbers_of_layers_tell_what_a_pass_takes_beside_them(tmp_path):
    fixed = Both(2 * MS, MS)
    passes = load_passes([ran(tmp_path / "a", first_layers=2, fixed=fixed)], training())
    (one,) = passes.profiles
    assert (one.fixed, one.layer) == (fixed, LAYER)
    assert one.first == Both(0, EMBEDDING_MS * MS)
    assert one.last == Both(OUTPUT_MS * MS, 0)
    its = Parallel(pp=1, microbatch=4, global_batch=8)
    assert passes.stage_cost(MODEL, its, 2, (False, False), (0, 0)) == StageCost((2 + 4 * 6) * MS, (1 + 4 * 10) * MS)
    divided = passes.stage_cost(MODEL, replace(its, cp=2), 2, (False, False), (0, 0))
    assert divided == StageCost((2 + 2 * 6) * MS, (1 + 2 * 10) * MS)


def test_stages_with_other_numbers_of_parameters_tell_what_a_step_takes_beside_them(tmp_path):
    (alike,) = load_passes([ran(tmp_path / "a", step_ns=MS)], training()).profiles
    assert alike.step_s == 0
    passes = load_passes([ran(tmp_path / "b", step_ns=MS, first_layers=2)], training())
    few, many = (
        stage_parameters(replace(MODEL, layers=layers), Parallel(pp=1, global_batch=1), 0) for layers in (2, 8)
    )
    of_layer = (many - few) / 6
    assert passes.step_s_per_parameter(1) * of_layer == pytest.approx(1e-3, rel=0.05)  # the ends have parameters, too
    # the drain's two collectives, and what is between and around them, are of every iteration
    assert STEP_MS / 1e3 < passes.step_s(1) < (STEP_MS + 3) / 1e3


def test_stages_that_vary_wait_for_each_other_and_a_single_one_does_not(tmp_path):
    (even,) = load_passes([ran(tmp_path / "a")], training()).profiles
    assert even.waits == 1
    passes = load_passes([ran(tmp_path / "b", varying_ns=2 * MS)], training())
    (uneven,) = passes.profiles
    assert 1.02 < uneven.waits < 1.5
    assert (uneven.layer, uneven.last) == (even.layer, even.last)
    its = Parallel(pp=2, global_batch=8)
    two = passes.stage_cost(MODEL, its, 4, (True, False), (0, 0))
    assert two.forward_ns == round(4 * 3 * MS * uneven.waits)
    one = passes.stage_cost(MODEL, replace(its, pp=1), 4, (True, False), (0, 0))
    assert one.forward_ns == 4 * 3 * MS


@pytest.mark.parametrize("step_ns", [0, 10 * MS, 50 * MS])
def test_what_waits_cost_is_told_whatever_a_step_takes(tmp_path, step_ns):
    passes = load_passes([ran(tmp_path / "a", varying_ns=2 * MS, step_ns=step_ns)], training())
    (one,) = passes.profiles
    (free,) = load_passes([ran(tmp_path / "b", varying_ns=2 * MS)], training()).profiles
    assert one.waits == pytest.approx(free.waits, rel=1e-3)


def test_what_a_step_takes_of_itself_is_counted_for_each_rank():
    profile = Profile(1, 1, LAYER, NONE, NONE, 1e-9)
    its = Parallel(pp=2, global_batch=4)
    links = Links(((0.0, 1.0), (1.0, 0.0)), ((0.0, 0.0), (0.0, 0.0)), (0, 0))
    without, with_it = (
        iteration(MODEL, GPUS["a100-80gb"], 0.45, its, lay_out(links, its), Passes([one]))
        for one in (profile, replace(profile, step_s=0.25))
    )
    assert with_it.costs.optimizer_ns == tuple(own + 250 * MS for own in without.costs.optimizer_ns)
    assert timeline(with_it).period_ns == timeline(without).period_ns + 250 * MS


def test_a_run_whose_iterations_were_all_filled_is_refused(tmp_path):
    folder = ran(tmp_path / "a")
    for path in (folder / "records" / "1").glob("rank*.jsonl"):
        record = read_rank(path)
        write_rank(path, replace(record, iterations=[replace(one, filling=True) for one in record.iterations]))
    with pytest.raises(ConfigError, match="jobs filled all its iterations; expected a run with --fill-profile-only"):
        load_passes([folder], training())


def test_there_is_no_fixed_part_where_it_would_be_below_zero(tmp_path):
    (one,) = load_passes([ran(tmp_path / "a", first_layers=2, fixed=Both(-2 * MS, 0))], training()).profiles
    assert one.fixed == NONE
    assert one.layer.forward_ns == (MS + 7 * MS) / (1 + 3)  # of a stage with one layer, and of one with three
    assert one.layer.backward_ns == LAYER.backward_ns


def test_of_two_stages_the_first_is_all_layers(tmp_path):
    (one,) = load_passes([ran(tmp_path / "a", chunks=1)], training()).profiles
    assert one.layer == Both(3 * MS, 5 * MS + EMBEDDING_MS * MS / 4)
    assert one.first == Both(0, 0)
    assert one.last == Both(OUTPUT_MS * MS, 0)


def test_what_was_measured_is_predicted_again(tmp_path):
    """Of another number of micro-batches and stages, too."""
    passes = load_passes([ran(tmp_path / "a")], training())
    for pp, chunks, microbatches in ((2, 2, 4), (4, 1, 8), (1, 1, 4), (2, 1, 4)):
        name = "interleaved" if chunks > 1 else "1f1b"
        its = Parallel(pp=pp, chunks=chunks, global_batch=microbatches, schedule=name, precision=Precision.FP32)
        count = 8 // (pp * chunks)
        stages = [StageCost(count * 3 * MS, count * 5 * MS) for _ in range(pp * chunks)]
        stages[0] = replace(stages[0], backward_ns=stages[0].backward_ns + EMBEDDING_MS * MS)
        stages[-1] = replace(stages[-1], forward_ns=stages[-1].forward_ns + OUTPUT_MS * MS)
        row = (1e30,) * pp
        links = Links((row,) * pp, ((0.0,) * pp,) * pp, (0,) * pp, rendezvous=True)
        found = iteration(MODEL, GPUS["a100-80gb"], 0.45, its, lay_out(links, its), passes)
        assert found.costs.stages == tuple(stages)
        costs = replace(found.costs, reduce_ns=found.reduce_ns)
        expected = simulate(make_schedule(name, pp, microbatches, chunks), costs, rendezvous=True)
        assert timeline(found).period_ns == expected.period_ns


def test_between_two_micro_batch_sizes_times_are_interpolated(tmp_path):
    folders = [ran(tmp_path / "a"), ran(tmp_path / "b", microbatch=4, slower=3)]
    passes = load_passes(folders, training())
    its = Parallel(pp=1, microbatch=1, global_batch=8)
    for microbatch, times in ((1, 1), (4, 3), (2, 5 / 3), (7, 5)):
        cost = passes.stage_cost(MODEL, replace(its, microbatch=microbatch, global_batch=56), 1, (False, False), (0, 0))
        assert cost.forward_ns == pytest.approx(3 * MS * times, abs=1)
        assert cost.backward_ns == pytest.approx(5 * MS * times, abs=1)


def test_with_one_profile_times_grow_with_the_micro_batch_and_recomputation_runs_forward_again():
    passes = Passes([Profile(1, 2, LAYER, Both(0, 0), Both(7, 9), 1e-9)])
    its = Parallel(pp=1, microbatch=4, global_batch=8)
    assert passes.stage_cost(MODEL, its, 3, (True, True), (0, 0)) == StageCost(18 * MS + 14, 30 * MS + 18)
    full = replace(its, recompute=Recompute.FULL)
    assert passes.stage_cost(MODEL, full, 3, (False, False), (0, 0)) == StageCost(18 * MS, 48 * MS)
    block = passes.stage_cost(MODEL, replace(full, recomputed=1), 3, (False, False), (0, 0))
    assert block == StageCost(18 * MS, 36 * MS)
    selective = passes.stage_cost(MODEL, replace(its, recompute=Recompute.SELECTIVE), 3, (False, False), (0, 0))
    assert 30 * MS < selective.backward_ns < 48 * MS
    assert passes.stage_cost(MODEL, replace(its, cp=2), 3, (False, False), (1e-3, 2e-3)) == StageCost(12 * MS, 21 * MS)


def test_only_layouts_whose_tensor_parallelism_was_measured_are_proposed(tmp_path):
    passes = load_passes([ran(tmp_path / "a")], training())
    cluster = Cluster.model_validate({"nodes": 1, "gpus_per_node": 4, "gpu": "a100-80gb", "network": "dgx-a100"})
    found = search(Evaluator(training(), cluster, cluster.links(Path()), passes), 50)
    assert {one.parallel.tp for one in found.proposals} == {1}
    assert found.excluded["--profile has no run with --tensor-model-parallel-size 2"] > 0
    fixed = training("--tensor-model-parallel-size 2")
    with pytest.raises(ConfigError, match="--profile has no run with --tensor-model-parallel-size 2"):
        search(Evaluator(fixed, cluster, cluster.links(Path()), passes))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--recompute-granularity full", "the run recomputes activations"),
        ("--bf16", "the run is in bf16; expected fp32, as in the flags"),
        ("--swiglu", "the run's model has swiglu True; expected False"),
        ("--tensor-model-parallel-size 2", "the run has 2 ranks for 2 tensor-parallel ranks of 2 stages"),
        ("--fp8-format hybrid", "the run is in FP8; expected the same"),
        ("--mtp-num-layers 1", "expected 0, as in the flags"),
        ("--fp4-format e2m1", "the command of the run: --fp4-format: FP4 is not weighed"),
        ("--pipeline-model-parallel-size 1", "the run has one stage; expected two or more"),
    ],
)
def test_runs_that_are_no_profile_are_refused(tmp_path, flags, expected):
    folder = ran(tmp_path / "a", flags)
    with pytest.raises(ConfigError, match=expected) as raised:
        load_passes([folder], training())
    assert str(folder) in str(raised.value)


def test_two_profiles_of_one_kind_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="another profile of tensor parallelism 1 and micro-batches of 1"):
        load_passes([ran(tmp_path / "a"), ran(tmp_path / "b")], training())


def test_records_without_passes_are_refused(tmp_path):
    folder = ran(tmp_path / "a")
    for path in (folder / "records" / "1").glob("rank*.jsonl"):
        path.unlink()
    with pytest.raises(ConfigError, match="no records of ranks"):
        load_passes([folder], training())


@pytest.mark.parametrize("seed", range(60))
def test_where_transfers_hold_both_ends_iterations_are_longer_and_the_bound_still_holds(seed):
    its = random_iteration(random.Random(seed))
    both = timeline(replace(its, rendezvous=True)).period_ns
    assert bound_ns(its) <= timeline(its).period_ns <= both


def test_with_nccl_a_stage_goes_on_when_what_it_sends_has_arrived_unless_it_has_virtual_stages():
    """By hand: two stages of three microbatches; 1F1B has two exchanges, of 5 ns on and 3 ns back at once."""
    links = Links(((0.0, 1.0), (1.0, 0.0)), ((0.0, 0.0), (0.0, 0.0)), (0, 0))
    its = Parallel(pp=2, global_batch=3)
    times = iteration(MODEL, GPUS["a100-80gb"], 0.45, its, lay_out(links, its))
    costs = PipelineCosts((StageCost(10, 20),) * 2, 0, (0, 0), (0, 0))
    one = replace(times, costs=costs, reduce_ns=(0, 0), transfers_ns=(((5, 3), (0, 0)),))
    found = timeline(one)
    assert found.period_ns == 10 + 5 + 30 + (5 + 30) * 2 + 3 + 20
    assert timeline(replace(one, rendezvous=False)).period_ns < found.period_ns
    several = Parallel(pp=2, chunks=2, global_batch=4, schedule="interleaved")
    assert not iteration(MODEL, GPUS["a100-80gb"], 0.45, several, lay_out(links, several)).rendezvous


def test_over_gloo_what_two_ranks_send_each_other_at_once_goes_one_way_after_the_other():
    its = Parallel(pp=2, global_batch=2)
    links = Links(((0.0, 1.0), (1.0, 0.0)), ((0.0, 0.0), (0.0, 0.0)), (0, 0), rendezvous=True)
    times = iteration(MODEL, GPUS["a100-80gb"], 0.45, its, lay_out(links, its))
    costs = PipelineCosts((StageCost(0, 0),) * 2, 0, (0, 0), (0, 0))
    free = replace(times, costs=costs, reduce_ns=(0, 0), transfers_ns=(((5, 3), (0, 0)),))
    # forward, forward with backward, backward
    assert timeline(free).period_ns == 5 + (5 + 3) + 3
    assert timeline(replace(free, rendezvous=False)).period_ns == 5 + 3

"""Kinds of fill jobs: described ones against published figures, and measured ones."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.fill.errors import ConfigError
from megatron.fill.models import MODELS, Encoder
from megatron.fill.planner.search import best_plan
from megatron.fill.profiles import BubbleCycle, BubbleSlot, Configuration, JobProfile, NodeProfile, Offload
from megatron.fill.types import BubbleKind
from megatron.fill.wings.mainjob.hardware import GIB, GPUS, GpuKind
from megatron.fill.wings.sim.filljobs.catalog import (
    CATALOG,
    CONTEXT_BYTES,
    catalog_kind,
    catalog_kinds,
    encoder,
    measured_kinds,
)
from megatron.fill.wings.sim.filljobs.fillmodel import FillModel, inference_profiles, training_profiles
from megatron.fill.wings.sim.filljobs.freeride import SIDE_TASKS

V100, V100_32, A100 = GPUS["v100-16gb"], GPUS["v100-32gb"], GPUS["a100-40gb"]
ROOMY = replace(V100, memory_bytes=10**15)
MIX = [name for name in CATALOG if not name.startswith("efficientnet-v2-l")]  # which has B4 for both
BERT = CATALOG["bert-base-inference"][0]


def bert(layers: int, hidden: int, tokens: int) -> FillModel:
    return FillModel("bert", encoder(Encoder(layers, hidden, hidden // 64, 30522, 512), tokens), BERT.speed)


def rate(model: FillModel, gpu: GpuKind, batch: int, training: bool = False) -> float:
    """Samples per second in the plain configuration of this batch."""
    gpu = replace(gpu, memory_bytes=ROOMY.memory_bytes)
    its = replace(model, batch=batch)
    profiles = (training_profiles if training else inference_profiles)(its, gpu, 0)
    found = next(one for one in profiles if one.configuration == Configuration(batch))
    return found.work / found.duration_ns * 1e9


# Against published figures


@pytest.mark.parametrize(
    ("name", "parameters", "forward_flops", "blocks"),
    [  # twice the multiply-adds; of the BERTs 2 per parameter of a layer and token, and the attention's
        ("efficientnet-b4-inference", 19.3e6, 2 * 4.4e9, 34),
        ("efficientnet-v2-l-inference", 118.5e6, 71.8e9, 81),
        ("bert-base-inference", 110e6, 22.4e9, 13),
        ("bert-large-inference", 335e6, 78.9e9, 25),
        ("swin-large-inference", 196.5e6, 2 * 34.5e9, 28),
        ("xlm-roberta-xl-inference", 3.47e9, 731e9, 37),
    ],
)
def test_models_are_as_large_as_published(name, parameters, forward_flops, blocks):
    model = CATALOG[name][0]
    assert model.parameters == pytest.approx(parameters, rel=0.015)
    assert sum(block.flops for block in model.blocks) == pytest.approx(forward_flops, rel=0.015)
    assert len(model.blocks) == blocks


def test_the_runtime_has_every_model_that_is_simulated_and_the_other_way_round():
    simulated = {model.name: model.parameters for model, _ in CATALOG.values()}
    measured = {name for name in MODELS if f"freeride-{name}" in SIDE_TASKS}
    assert simulated.keys() | measured == MODELS.keys()
    for name, parameters in simulated.items():
        assert parameters == pytest.approx(MODELS[name].parameters, rel=0.015)


@pytest.mark.parametrize(("batch", "published"), [(1, 206.8), (2, 376.8), (4, 635), (8, 962.83)])
def test_the_figures_that_the_transformers_constants_were_fitted_to(batch, published):
    assert rate(bert(12, 768, 128), V100, batch) == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize(
    ("layers", "hidden", "tokens", "gpu", "batch", "training", "published"),
    [  # NVIDIA DeepLearningExamples, TensorFlow BERT
        (12, 768, 384, V100, 8, False, 421.26),
        (24, 1024, 128, V100, 8, False, 385.64),
        (24, 1024, 384, V100, 8, False, 148.57),
        (24, 1024, 128, V100, 16, True, 134.34),
        (24, 1024, 128, V100_32, 64, True, 168.63),
        (24, 1024, 512, V100, 4, True, 28.72),
        (24, 1024, 512, V100_32, 8, True, 31.23),
        (24, 1024, 128, A100, 64, True, 356.8),
        (24, 1024, 128, A100, 8, False, 495.75),
        (12, 768, 128, A100, 8, False, 1216.4),
    ],
)
def test_figures_that_nothing_was_fitted_to(layers, hidden, tokens, gpu, batch, training, published):
    assert rate(bert(layers, hidden, tokens), gpu, batch, training) == pytest.approx(published, rel=0.17)


@pytest.mark.parametrize(
    ("batch", "training", "published"),
    [  # NVIDIA DeepLearningExamples, PyTorch EfficientNet-B4
        *((8, False, 242), (16, False, 488), (32, False, 738), (64, False, 809), (256, False, 847), (64, True, 204)),
    ],
)
def test_efficientnet_is_as_fast_as_published(batch, training, published):
    assert rate(CATALOG["efficientnet-b4-inference"][0], V100, batch, training) == pytest.approx(published, rel=0.11)


# What must hold for all of them


@pytest.mark.parametrize("name", CATALOG)
@pytest.mark.parametrize("gpu", ["v100-16gb", "a100-40gb", "h100-80gb"])
def test_a_kind_fits_its_gpu_and_is_at_its_best_alone(name, gpu):
    kind = catalog_kind(name, GPUS[gpu])
    assert kind.name == name
    assert kind.unit == "samples"
    for profile in kind.profiles:
        assert CONTEXT_BYTES < profile.memory_bytes <= GPUS[gpu].memory_bytes
        assert profile.work / profile.duration_ns * 1e9 <= kind.alone_rate
    assert len({profile.configuration for profile in kind.profiles}) == len(kind.profiles)


@pytest.mark.parametrize("name", ["efficientnet-b4-inference", "bert-large-inference", "swin-large-inference"])
def test_larger_batches_are_more_efficient_and_need_more_memory(name):
    profiles = list(inference_profiles(CATALOG[name][0], ROOMY, 0))
    for small, large in pairwise(profiles):
        assert large.work == 2 * small.work
        assert small.duration_ns <= large.duration_ns < 2 * small.duration_ns
        assert small.memory_bytes < large.memory_bytes


@given(
    st.sampled_from(sorted({model.name for model, _ in CATALOG.values()})),
    st.sampled_from([8, 16, 32]),
)
@settings(max_examples=25)
def test_what_a_training_saves_in_memory_costs_time(name, micro):
    model = CATALOG[f"{name}-training"][0]
    found = {
        (its.configuration.offload, its.configuration.checkpointing): its
        for its in training_profiles(model, ROOMY, 0)
        if its.configuration.batch_size == micro
    }
    order = [
        ((Offload.NONE, False), (Offload.NONE, True)),
        ((Offload.OPTIMIZER, False), (Offload.OPTIMIZER, True)),
        ((Offload.NONE, False), (Offload.OPTIMIZER, False)),
        ((Offload.NONE, True), (Offload.OPTIMIZER, True)),
        ((Offload.OPTIMIZER, True), (Offload.WEIGHTS, True)),
    ]
    for plain, thrifty in order:
        assert found[thrifty].memory_bytes < found[plain].memory_bytes
        assert found[thrifty].duration_ns > found[plain].duration_ns


def test_a_training_step_is_its_micro_batches_and_the_optimizer():
    model = bert(2, 768, 128)
    profiles = {str(its.configuration): its for its in training_profiles(model, ROOMY, 1000)}
    assert {its.work for its in profiles.values()} == {32}
    assert [len(profiles[f"b{micro}"].nodes) for micro in (2, 8, 32)] == [16 * 6 + 3, 4 * 6 + 3, 6 + 3]
    assert "b1" not in profiles  # 32 micro-batches a step would be too many nodes
    names = [node.name for node in profiles["b32"].nodes]
    assert names[:4] == ["embedding forward", "layer 0 forward", "layer 1 forward", "layer 1 backward"]
    assert names[-3:] == ["step 0", "step 1", "step 2"]


def test_training_memory_is_state_and_activations():
    model = bert(2, 768, 128)
    profiles = {str(its.configuration): its for its in training_profiles(model, ROOMY, 1000)}
    plain = profiles["b32"]
    kept = 32 * sum(block.kept_bytes for block in model.blocks)
    last = model.blocks[-1]
    peak = 1000 + 16 * model.parameters + kept + 2 * last.parameters + 32 * 2 * last.output_bytes
    assert plain.memory_bytes == pytest.approx(peak, abs=1)
    assert plain.nodes[-1].memory_bytes == pytest.approx(1000 + 16 * model.parameters, abs=1)
    streamed = profiles["b32+checkpointing+offload-weights"]
    assert streamed.nodes[-1].memory_bytes == pytest.approx(1000 + 16 * model.parameters / 3, abs=1)


def test_the_planner_takes_a_kind():
    kind = catalog_kind("bert-large-training", V100)
    cycle = BubbleCycle(10**9, (BubbleSlot(BubbleKind.FWD_BWD, 400_000_000, 6 * GIB),))
    plan = best_plan(cycle, kind.profiles)
    assert 0.3 * kind.alone_rate * 0.4 < plan.work_per_cycle < kind.alone_rate * 0.4


def test_a_kind_that_is_unknown_or_too_large_is_refused():
    with pytest.raises(ValueError, match="'bert' is not a kind of fill job; expected one of efficientnet-b4-training"):
        catalog_kinds(V100, ["bert"])
    small = replace(V100, memory_bytes=GIB)
    with pytest.raises(ValueError, match="xlm-roberta-xl-training fits the 1 GiB of v100-16gb in no configuration"):
        catalog_kinds(small, ["bert-base-inference", "xlm-roberta-xl-training"])


def test_all_kinds_are_those_that_the_gpu_can_hold():
    assert [kind.name for kind in catalog_kinds(V100)] == MIX
    small = {kind.name for kind in catalog_kinds(replace(V100, memory_bytes=2 * GIB))}
    assert small == {name for name in MIX if "xlm" not in name}
    with pytest.raises(ValueError, match="'freeride-image' is not a kind"):
        catalog_kinds(V100, ["freeride-image"])


def test_freerides_side_tasks_are_there_on_the_gpu_that_they_were_measured_on():
    ada = GPUS["rtx-6000-ada"]
    assert {kind.name for kind in catalog_kinds(ada)} == {*MIX, *SIDE_TASKS}
    (resnet,) = catalog_kinds(ada, ["freeride-resnet18"])
    assert resnet.alone_rate == pytest.approx(2172, rel=0.001)  # images per second, in batches of 32
    by_batch = {profile.configuration.batch_size: profile for profile in resnet.profiles}
    assert (by_batch[64].duration_ns, by_batch[64].work) == (31_110_000, 64)
    assert [len(kind.profiles) for kind in SIDE_TASKS.values()] == [9, 9, 9, 1, 1, 1]


# Measured kinds


def profile(batch: int, duration_ns: int) -> JobProfile:
    nodes = (NodeProfile("a", duration_ns // 2, 100), NodeProfile("b", duration_ns - duration_ns // 2, 200))
    return JobProfile(Configuration(batch), nodes, float(batch))


def test_measured_profiles_make_a_kind(tmp_path):
    path = tmp_path / "profiles.json"
    profiles = [profile(1, 2_000_000), profile(4, 4_000_000)]
    path.write_text(json.dumps({"digits": [its.to_dict() for its in profiles]}))
    (kind,) = measured_kinds(path)
    assert kind.name == "digits"
    assert kind.profiles == tuple(profiles)
    assert kind.alone_rate == pytest.approx(4 / 0.004)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "cannot be read: No such file"),
        ("nonsense", "is not JSON"),
        ("[]", "found a list"),
        ("{}", "found nothing"),
        ('{"digits": []}', r"job 'digits': found \[\]"),
        ('{"digits": 3}', "job 'digits': found 3, which is no list of profiles"),
        ('{"digits": [{"work": 1}]}', "job 'digits': not the profile of a job: KeyError"),
        (json.dumps({"digits": [profile(1, 0).to_dict()]}), "job 'digits': b1: all nodes take 0 ns"),
    ],
)
def test_a_file_that_is_none_names_itself_and_the_job(tmp_path, content, expected):
    path = tmp_path / "profiles.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=f"profiles.json: .*{expected}.*; expected a list of profiles per job name"):
        measured_kinds(path)

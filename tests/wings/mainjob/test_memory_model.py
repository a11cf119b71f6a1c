"""``pipefill memory-model``: what is learned from measured peaks, its file, and what the configurator makes of it."""

from __future__ import annotations

import json
import random
import shlex
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from megatron.fill.cli.app import app
from megatron.fill.errors import ConfigError
from megatron.fill.wings.configure.cluster import Cluster
from megatron.fill.wings.configure.correction import Correction, Network
from megatron.fill.wings.configure.flags import read_flags
from megatron.fill.wings.configure.peaks import Peak, fitted, laid_out, learn, load_peaks
from megatron.fill.wings.configure.search import Evaluator, search
from tests.support.memory_cases import CASES, asked, stages

CALLS = {
    "[]": r"found \[\]; expected a JSON file with a list \"peaks\"",
    '{"peaks": 7}': "expected a JSON file with a list",
    '{"peaks": []}': "peaks has 0 entries; expected at least 20",
    "{": "is not JSON",
}
FLAGS = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --vocab-size 1000 --bf16"
ENTRY = {"flags": f"{FLAGS} --global-batch-size 8", "gpus": 2, "stage": 0, "peak_bytes": 10**9}
WRONG = [
    ("flags", 7, r"peaks\[19\].flags is 7; expected Megatron's flags as text"),
    ("flags", "--num-layers x", r"peaks\[19\]: --num-layers is 'x': expected a whole number"),
    ("flags", "'", r"peaks\[19\]: No closing quotation"),
    ("gpus", 0, r"peaks\[19\].gpus is 0; expected a whole number from 1"),
    ("gpus", True, r"gpus is True; expected a whole number"),
    ("stage", 1, r"peaks\[19\].stage is 1; expected less than the 1 stages"),
    ("peak_bytes", 953, r"peaks\[19\].peak_bytes is 953; expected bytes, of which the accounting has 288604160"),
    ("peak_bytes", "1GiB", r"peak_bytes is '1GiB'; expected a whole number from 1"),
]


def peaks(factor=lambda its: 1.0) -> list[Peak]:
    """Of the benchmark's trainings, each as much as the accounting says, times a factor."""
    found = []
    for model, its in CASES.values():
        for stage in stages(its):
            one = Peak(model, its, stage, 1)
            found.append(replace(one, peak_bytes=round(one.analytic_bytes * factor(its))))
    return found


@pytest.fixture(scope="module")
def learned():
    """From peaks that are a tenth higher with tensor parallelism."""
    return learn(peaks(lambda its: 1.1 if its.tp > 1 else 1.0))


def test_what_the_accounting_lacks_is_learned(learned):
    correction, errors = learned
    assert errors.samples == 16
    assert correction.samples == len(peaks()) - 16
    assert errors.corrected_mean < 0.5 * errors.analytic_mean
    assert (correction.least, correction.most) == pytest.approx((1.0, 1.1))
    assert 0 <= correction.margin < 0.1


def test_peaks_of_one_training_and_stage_are_not_held_out_from_each_other(tmp_path):
    found = [replace(one, peak_bytes=one.peak_bytes + at) for at, one in enumerate(peaks())]
    assert learn([*found, *found])[1].samples == 2 * learn(found)[1].samples
    source = random.Random(1)
    noisy = [replace(one, peak_bytes=round(one.peak_bytes * source.uniform(0.9, 1.1))) for one in found]
    once, thrice = (learn(its)[1].corrected_mean for its in (noisy, noisy * 3))
    assert thrice > 0.7 * once
    (tmp_path / "p.json").write_text(json.dumps({"peaks": [ENTRY] * 20}))
    with pytest.raises(ConfigError, match="peaks has 1 different trainings and stages; expected at least 20"):
        load_peaks(tmp_path / "p.json")


def test_a_factor_stays_in_the_range_that_was_learned_from(learned):
    correction, _ = learned
    model, its = CASES["pipeline"]
    far = replace(its, tp=8, dp=64, global_batch=64 * 64, microbatch=64)
    for one in (its, far):
        assert 1.0 <= correction.factor(replace(model, sequence=65536), one, 0) <= 1.1 + 1e-9


def test_where_the_accounting_is_exact_nothing_is_changed():
    found = fitted(peaks())
    assert found.factor(*CASES["pipeline"], 0) == pytest.approx(1, abs=1e-6)


def test_a_network_learns_a_function():
    source = np.random.default_rng(1)
    rows = source.normal(size=(200, 3))
    wanted = rows[:, 0] * rows[:, 1] + 3
    found = Network.fit(rows[:150], wanted[:150])
    assert np.abs(found(rows[150:]) - wanted[150:]).mean() < 0.2 * np.abs(wanted[150:] - 3).mean()


def test_the_file_gives_back_what_was_saved(learned, tmp_path):
    correction, _ = learned
    path = tmp_path / "m.json"
    correction.save(path)
    again = Correction.load(path)
    for name in ("groups, swiglu", "experts, divided", "full, tensor"):
        assert again.factor(*CASES[name], 0) == correction.factor(*CASES[name], 0)
    assert (again.margin, again.samples) == (correction.margin, correction.samples)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"features": ["gpus"]}, "features are not those of this version"),
        ({"mean": [1.0]}, r"mean is \[1.0\]; expected \d+ finite numbers"),
        ({"scale": "x"}, "scale is 'x'; expected"),
        ({"least": 0}, "least is 0; expected a number above 0"),
        ({"margin": -1}, "margin is -1; expected a number from 0"),
        ({"least": 9, "most": 1}, "least or scale is out of range"),
        ({"layers": []}, r"layers is \[\]; expected a list of layers"),
        ({"layers": [{"weights": [[1.0]], "biases": [0.0]}]}, r"layers\[0\].weights is .*; expected \d+ x 1 finite"),
        ({"samples": None}, "samples is None; expected a number above 0"),
    ],
)
def test_a_wrong_file_is_named_with_its_field(learned, tmp_path, change, told):
    path = tmp_path / "m.json"
    learned[0].save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=rf"m\.json: {told}"):
        Correction.load(path)


@pytest.mark.parametrize("missing", ["features", "layers", "margin"])
def test_a_field_that_is_missing_is_named(learned, tmp_path, missing):
    path = tmp_path / "m.json"
    learned[0].save(path)
    content = json.loads(path.read_text())
    del content[missing]
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=f"m.json: {missing} is missing; expected a file that pipefill memory-model"):
        Correction.load(path)


@pytest.mark.parametrize("text", CALLS)
def test_a_file_without_peaks_is_refused(tmp_path, text):
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=CALLS[text]):
        load_peaks(path)


@pytest.mark.parametrize(("name", "value", "told"), WRONG)
def test_a_wrong_peak_is_named(tmp_path, name, value, told):
    path = tmp_path / "p.json"
    path.write_text(json.dumps({"peaks": [ENTRY] * 19 + [ENTRY | {name: value}]}))
    with pytest.raises(ConfigError, match=told):
        load_peaks(path)


def test_a_training_is_read_back_from_its_flags():
    for name in (
        "uneven, selective",
        "virtual, tensor",
        "groups, swiglu, tensor",
        "experts, divided",
        "half precision",
    ):
        model, its = CASES[name]
        flags = list(asked((model, its), 0).flags)
        at = flags.index("--vocab-size") + 1
        flags[at] = str(model.vocabulary)  # the benchmark's tokenizer adds one
        flags += ["--transformer-impl", "local"]
        assert laid_out(flags, its.gpus) == (replace(model, ffn_hidden=model.ffn), its)


def test_a_layout_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="gpus is 3: expected a multiple of the 2 that one replica has"):
        laid_out(shlex.split(f"{FLAGS} --global-batch-size 8 --tensor-model-parallel-size 2"), 3)
    with pytest.raises(ConfigError, match="describe no layout: pp \\* chunks is 3"):
        laid_out(shlex.split(f"{FLAGS} --global-batch-size 8 --pipeline-model-parallel-size 3"), 3)


def test_the_command_says_how_good_it_is_and_the_configurator_uses_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = random.Random(1)
    entries = []
    for size in range(30):
        flags = f"{FLAGS} --global-batch-size {8 * (1 + size)} --micro-batch-size {1 + size % 2}"
        layout = laid_out(shlex.split(flags), 2)
        more = Peak(*layout, 0, 1).analytic_bytes * (1.3 + source.uniform(-0.001, 0.001))
        entries.append({"flags": flags, "gpus": 2, "stage": 0, "peak_bytes": round(more)})
    (tmp_path / "p.json").write_text(json.dumps({"peaks": entries}))
    done = CliRunner().invoke(app, ["memory-model", "p.json", "--output", "m.json", "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.output)
    assert (told["samples"], told["held_out"]) == (24, 6)
    assert told["corrected_worst"] < 0.01 < told["analytic_mean"]
    training = read_flags(shlex.split(f"{FLAGS} --global-batch-size 8"))
    there = Cluster.model_validate({"nodes": 1, "gpus_per_node": 2, "gpu": "a100-40gb", "network": "dgx-a100"})
    plain, corrected = (
        search(Evaluator(training, there, there.links(tmp_path), correction=its), 3).proposals
        for its in (None, Correction.load(tmp_path / "m.json"))
    )
    assert [one.parallel for one in plain] == [one.parallel for one in corrected]
    for one, other in zip(plain, corrected, strict=True):
        for held, with_it in zip(one.memory, other.memory, strict=True):
            assert with_it.total_bytes / held.total_bytes == pytest.approx(1.3, rel=0.01)
    tight = there.model_copy(update={"memory": there.memory_reserve + round(1.1 * plain[0].peak_bytes)})
    kept = search(Evaluator(training, tight, tight.links(tmp_path)), 1).proposals[0]
    assert kept.parallel == plain[0].parallel
    correction = Correction.load(tmp_path / "m.json")
    assert search(Evaluator(training, tight, tight.links(tmp_path), correction=correction), 1).proposals[0] != kept

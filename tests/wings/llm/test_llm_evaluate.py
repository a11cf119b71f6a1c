"""``EvaluateCheckpoints`` and what it reads: Megatron's checkpoints and its validation samples."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from concurrent.futures import wait

import numpy as np
import pytest

from megatron.fill.errors import TaskError
from megatron.fill.sidetask.base import TaskContext

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("greenlet")

from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, save  # noqa: E402

from megatron.fill.wings.llm import EvaluateCheckpoints  # noqa: E402
from megatron.fill.wings.llm.cache import pages_for  # noqa: E402
from megatron.fill.wings.llm.evaluate import _CHECK  # noqa: E402
from megatron.fill.wings.llm.heldout import validation_samples  # noqa: E402
from megatron.fill.wings.llm.megatron import IncompleteCheckpoint, checkpoints, latest, load_megatron  # noqa: E402
from megatron.fill.wings.llm.models import load_language_model, tokenizer_of  # noqa: E402
from megatron.fill.wings.llm.passes import ModelRunner, RowInput, decoder_layers, layer_by_layer  # noqa: E402

HIDDEN, LAYERS, LENGTH = 16, 2, 8
ARGS = {
    "num_layers": LAYERS,
    "hidden_size": HIDDEN,
    "ffn_hidden_size": 4 * HIDDEN,
    "num_attention_heads": 2,
    "kv_channels": HIDDEN // 2,
    "group_query_attention": False,
    "num_query_groups": 1,
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "swiglu": False,
    "add_bias_linear": True,
    "bias_gelu_fusion": True,
    "openai_gelu": False,
    "layernorm_epsilon": 1e-5,
    "layernorm_zero_centered_gamma": False,
    "untie_embeddings_and_output_weights": False,
    "vocab_size": 256,
    "padded_vocab_size": 384,
    "max_position_embeddings": LENGTH,
    "tokenizer_type": "NullTokenizer",
    "tokenizer_model": None,
    "seq_length": LENGTH,
    "seed": 1,
    "split": "50,50,0",
    "eval_iters": 2,
    "global_batch_size": 3,
    "train_iters": 20,
    "eval_interval": 10,
    "skip_train": False,
}


def weights(seed=0):
    """Those of a GPT under Megatron's names, all layers of a kind in one tensor."""
    source = torch.Generator().manual_seed(seed)
    shapes = {
        "embedding.word_embeddings.weight": (384, HIDDEN),
        "embedding.position_embeddings.weight": (LENGTH, HIDDEN),
        "decoder.final_layernorm.weight": (HIDDEN,),
        "decoder.final_layernorm.bias": (HIDDEN,),
    }
    layers = {
        "self_attention.linear_qkv.layer_norm_weight": (HIDDEN,),
        "self_attention.linear_qkv.layer_norm_bias": (HIDDEN,),
        "self_attention.linear_qkv.weight": (3 * HIDDEN, HIDDEN),
        "self_attention.linear_qkv.bias": (3 * HIDDEN,),
        "self_attention.linear_proj.weight": (HIDDEN, HIDDEN),
        "self_attention.linear_proj.bias": (HIDDEN,),
        "mlp.linear_fc1.layer_norm_weight": (HIDDEN,),
        "mlp.linear_fc1.layer_norm_bias": (HIDDEN,),
        "mlp.linear_fc1.weight": (4 * HIDDEN, HIDDEN),
        "mlp.linear_fc1.bias": (4 * HIDDEN,),
        "mlp.linear_fc2.weight": (HIDDEN, 4 * HIDDEN),
        "mlp.linear_fc2.bias": (HIDDEN,),
    }
    shapes |= {f"decoder.layers.{name}": (LAYERS, *shape) for name, shape in layers.items()}
    return {name: torch.randn(shape, generator=source) * 0.3 for name, shape in shapes.items()}


class Rude:
    """An object that does something when it is read."""

    def __reduce__(self):
        return (exec, ("raise SystemExit('it was run')",))


def checkpoint(folder, iteration, prefix=None, seed=0, **args):
    path = folder / f"iter_{iteration:07d}"
    common = {"args": Namespace(**ARGS | args, data_path=[str(prefix)]), "rng": Rude(), "iteration": iteration}
    state = weights(seed) | {"common_state/shard_0_1": [common], "optimizer.state.exp_avg": torch.zeros(4)}
    planner = DefaultSavePlanner(flatten_state_dict=False)
    save(state, storage_writer=FileSystemWriter(path), planner=planner, no_dist=True)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return path


@pytest.fixture
def data(tmp_path):
    """20 documents of 30 tokens each, as Megatron's indexed data set."""
    source = np.random.default_rng(0)
    documents = [source.integers(0, 255, 30).astype(np.uint8) for _ in range(20)]
    prefix = tmp_path / "data"
    with open(f"{prefix}.bin", "wb") as file:
        file.write(np.concatenate(documents).tobytes())
    with open(f"{prefix}.idx", "wb") as file:
        file.write(b"MMIDIDX\0\0" + np.array([1], np.int64).tobytes() + bytes([1]))
        file.write(np.array([20, 21], np.int64).tobytes())
        file.write(np.full(20, 30, np.int32).tobytes() + np.arange(0, 600, 30, dtype=np.int64).tobytes())
        file.write(np.arange(21, dtype=np.int64).tobytes())
    return prefix, documents


def test_the_samples_are_whole_documents_of_the_split_in_the_order_of_the_seed(data):
    prefix, documents = data
    found = validation_samples(Namespace(**ARGS, data_path=[str(prefix)]), 1000)
    assert found.shape == ((10 * 30 - 1) // LENGTH, LENGTH + 1)
    random = np.random.RandomState(1)
    order = np.arange(10, 20, dtype=np.int32)
    random.shuffle(order)
    stream = np.concatenate([documents[number] for number in order])
    cut = [stream[at : at + LENGTH + 1].tolist() for at in range(0, len(found) * LENGTH, LENGTH)]
    assert sorted(found.tolist()) == sorted(cut)
    assert found.tolist() != cut


def test_nothing_of_a_checkpoint_is_run(data, tmp_path):
    saved = tmp_path / "saved"
    path = checkpoint(saved, 3, data[0])
    model, args = load_megatron(saved)
    assert args.hidden_size == HIDDEN
    assert model.config.vocab_size == 384  # Megatron's loss counts what fills the vocabulary up
    assert latest(saved) == path
    assert load_language_model(saved)[1].eos_ids == {255}


def test_rope_with_layernorm_becomes_gpt_neox(data, tmp_path):
    rope = {"position_embedding_type": "rope", "rotary_base": 10_000, "rotary_percent": 0.5}
    checkpoint(tmp_path / "saved", 1, data[0], **rope)
    model, _ = load_megatron(tmp_path / "saved")
    assert type(model).__name__ == "GPTNeoXForCausalLM"
    assert torch.equal(model.get_output_embeddings().weight, weights()["embedding.word_embeddings.weight"])


def test_what_no_model_is_like_is_refused_by_the_flags_name(data, tmp_path):
    checkpoint(tmp_path / "a", 1, data[0], num_experts=8)
    with pytest.raises(TaskError, match="--num-experts 8"):
        load_megatron(tmp_path / "a")
    checkpoint(tmp_path / "b", 1, data[0], swiglu=True)
    with pytest.raises(TaskError, match="swiglu True"):
        load_megatron(tmp_path / "b")
    checkpoint(tmp_path / "c", 1, data[0], tokenizer_type="GPT2BPETokenizer")
    with pytest.raises(TaskError, match="GPT2BPETokenizer"):
        load_language_model(tmp_path / "c")


def test_a_checkpoint_without_its_shards_is_incomplete(data, tmp_path):
    path = checkpoint(tmp_path / "saved", 1, data[0])
    next(path.glob("*.distcp")).unlink()
    with pytest.raises(IncompleteCheckpoint):
        load_megatron(path)
    (path / ".metadata").unlink()
    assert checkpoints(tmp_path / "saved") == {}
    with pytest.raises(IncompleteCheckpoint, match="no complete checkpoint"):
        load_megatron(tmp_path / "saved")


def task(folder, saved, **args):
    folder.mkdir(exist_ok=True)
    made = EvaluateCheckpoints()
    made.context = TaskContext("evaluate", folder)
    made.create(str(saved), **args)
    return made


def run(made, work, monkeypatch):
    """Until so much work is done; the kinds of steps, each once."""
    monkeypatch.setattr("megatron.fill.wings.llm.evaluate._LOOK_S", 0.0)
    kinds, done = set(), 0.0
    while done < work:
        kinds.add(made.next_node)
        done += made.run_next_step()
        if made.idle and made._loading is not None:
            wait([made._loading])
    return kinds


def lines(folder):
    return [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]


def test_every_checkpoint_is_evaluated_in_small_steps(data, tmp_path, monkeypatch):
    saved = tmp_path / "saved"
    made = task(tmp_path / "job", saved, prompts=["ab", "c"], new_tokens=4, batch_size=2)
    made.init()
    for _ in range(3):
        made.run_next_step()
        assert made.idle  # there is nothing to do yet
    for iteration in (5, 10):
        checkpoint(saved, iteration, data[0], seed=iteration)
    kinds = run(made, 2, monkeypatch)
    assert {0, 1, 2, 3} <= kinds
    samples = torch.from_numpy(validation_samples(Namespace(**ARGS, data_path=[str(data[0])]))[:6])
    for line, iteration in zip(lines(tmp_path / "job"), (5, 10), strict=True):
        model = load_megatron(saved / f"iter_{iteration:07d}")[0]
        with torch.no_grad():
            logits = model(samples[:, :-1]).logits
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), samples[:, 1:].flatten()).item()
        assert line["iteration"] == iteration
        assert line["loss"] == pytest.approx(expected, rel=1e-6)
        assert [sample["prompt"] for sample in line["samples"]] == ["ab", "c"]
    made.stop()
    other = task(tmp_path / "job", saved)
    other.load_state_dict(json.loads(json.dumps(made.state_dict())))
    other.init()
    checkpoint(saved, 15, data[0], seed=15)
    run(other, 1, monkeypatch)
    assert [line["iteration"] for line in lines(tmp_path / "job")] == [5, 10, 15]
    assert other.context.result["evaluated"] == 3


@pytest.mark.parametrize("prompts", [[], ["ab"]], ids=["loss", "samples"])
def test_a_model_that_answers_wrongly_is_refused_by_name(data, tmp_path, monkeypatch, prompts):
    def looks_ahead(path):
        model, args = load_megatron(path)
        plain = model.forward

        def forward(*given, **inputs):
            found = plain(*given, **inputs)
            found.logits = found.logits + found.logits.mean(1, keepdim=True)
            return found

        model.forward = forward
        return model, args

    monkeypatch.setattr("megatron.fill.wings.llm.megatron.load_megatron", looks_ahead)
    checkpoint(tmp_path / "saved", 5, data[0])
    made = task(tmp_path / "job", tmp_path / "saved", prompts=prompts)
    made.init()
    with pytest.raises(TaskError, match="iteration 5: GPT2LMHeadModel is no causal model"):
        run(made, 1, monkeypatch)
    assert not (tmp_path / "job" / "evaluations.jsonl").exists()


def test_what_only_samples_need_is_looked_into_with_samples_only(data, tmp_path, monkeypatch):
    plain = ModelRunner._inputs

    def wrong_positions(self, rows):
        inputs = plain(self, rows)
        if any(row.held is not None for row in rows):
            inputs["position_ids"] = torch.full_like(inputs["position_ids"], 3)
        return inputs

    monkeypatch.setattr(ModelRunner, "_inputs", wrong_positions)
    checkpoint(tmp_path / "saved", 5, data[0])
    made = task(tmp_path / "loss", tmp_path / "saved")
    made.init()
    steps = []

    def noted() -> bool:
        steps.append(made.next_node)
        return type(made).run_next_step(made)

    monkeypatch.setattr(made, "run_next_step", noted)
    run(made, 1, monkeypatch)
    assert steps.count(_CHECK) > 3 * LAYERS  # it is cut by layers as all else is
    made = task(tmp_path / "samples", tmp_path / "saved", prompts=["ab"])
    made.init()
    with pytest.raises(TaskError, match=r"iteration 5: GPT2LMHeadModel .* with a token tree its logits differ"):
        run(made, 1, monkeypatch)


def test_a_prompt_keeps_its_end_and_as_much_as_there_is_room_for_follows(data, tmp_path):
    checkpoint(tmp_path / "saved", 5, data[0])
    model, args = load_megatron(tmp_path / "saved")
    made = task(tmp_path / "job", tmp_path / "saved", prompts=["ab", "0123456789"], new_tokens=LENGTH)
    waiting = made._engine(model, tokenizer_of(args)).room.waiting
    wanted = [(bytes(one.wanted.prompt).decode(), one.wanted.most) for one in waiting]
    assert wanted == [("ab", LENGTH - 2), ("3456789", 1)]


def test_a_checkpoint_that_is_deleted_meanwhile_is_left_out(data, tmp_path, monkeypatch):
    saved = tmp_path / "saved"
    path = checkpoint(saved, 5, data[0])
    made = task(tmp_path / "job", saved)
    made.init()
    monkeypatch.setattr("megatron.fill.wings.llm.megatron.read_checkpoint", lambda path: gone(path))

    def gone(path):
        shutil.rmtree(path)
        raise IncompleteCheckpoint(f"checkpoint {path} is gone")

    made.run_next_step()
    wait([made._loading])
    made.run_next_step()
    assert not path.exists()
    assert made._done == [5]


def test_one_that_cannot_be_read_fails_the_job_and_says_why(data, tmp_path):
    saved = tmp_path / "saved"
    checkpoint(saved, 5, data[0], num_experts=8)
    made = task(tmp_path / "job", saved)
    made.init()
    made.run_next_step()
    wait([made._loading])
    with pytest.raises(TaskError, match=r"iteration 5: .*--num-experts 8"):
        made.run_next_step()


def test_what_runs_a_model_stops_before_each_layer_and_leaves_nothing_when_it_is_given_up(data, tmp_path):
    checkpoint(tmp_path / "saved", 5, data[0])
    model = load_megatron(tmp_path / "saved")[0].eval()
    layers, ids = decoder_layers(model), torch.tensor([[1, 2, 3]])
    found = []
    steps = layer_by_layer(layers, lambda: found.append(model(ids).logits))
    assert len(list(steps)) == LAYERS
    with torch.no_grad():
        assert torch.equal(found[0], model(ids).logits)
    assert not torch.is_inference_mode_enabled()
    runner = ModelRunner(model, LENGTH, 2)

    def through_a_runner():
        runner.cache.resize(pages_for(LENGTH), {})
        runner.begin([RowInput.following([1], [1, 2, 3], 0)])
        while not runner.passes.run():
            pass
        found.append(runner.passes.result)

    assert len(list(layer_by_layer(layers, through_a_runner))) == LAYERS
    assert torch.allclose(found[1], found[0], atol=1e-5)
    given_up = layer_by_layer(layers, through_a_runner)
    next(given_up)
    given_up.close()
    runner.passes.remove()
    assert len(found) == 2
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not torch.is_inference_mode_enabled()

    def fails():
        model(ids)
        raise ValueError("it fails")

    with pytest.raises(ValueError, match="it fails"):
        list(layer_by_layer(layers, fails))
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"metrics": ["accuracy"]}, "metrics has 'accuracy'"),
        ({"metrics": ["samples"]}, "prompts is empty"),
        ({"prompts": "ab"}, "prompts is 'ab': expected a list of texts"),
        ({"new_tokens": 0}, "new_tokens is 0"),
        ({"samples": -1}, "samples is -1"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path, args, message):
    with pytest.raises(ValueError, match=message):
        task(tmp_path / "job", tmp_path, **args)

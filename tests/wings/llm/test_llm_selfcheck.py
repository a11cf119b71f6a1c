"""A model is answered with rightly, or refused: whatever differs between the engine and the model alone is found."""

from __future__ import annotations

import random

import pytest

from megatron.fill.errors import TaskError
from tests.support.small_models import VOCABULARY, alone, model
from tests.wings.llm.test_llm_engine import engine, greedily, some_prompts

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("greenlet")

from megatron.fill.wings.llm import attention  # noqa: E402
from megatron.fill.wings.llm.selfcheck import check_finite, check_model  # noqa: E402

USUAL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
ROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 1e4}


def made(family, **shape):
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        names = {"initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        config = AutoConfig.for_model(family, vocab_size=VOCABULARY, **{**names, **shape})
        return AutoModelForCausalLM.from_config(config).eval()


WINDOWS = {
    "mistral": USUAL | {"num_key_value_heads": 2, "sliding_window": 12, "max_position_embeddings": 192},
    "gemma2": USUAL | {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 12, "max_position_embeddings": 192},
    "llama4_text": USUAL
    | {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "attention_chunk_size": 12,
        "intermediate_size_mlp": 64,
        "num_local_experts": 2,
        "max_position_embeddings": 192,
    },
}


@pytest.mark.parametrize("family", WINDOWS)
def test_a_window_is_the_models_own_in_batches_and_trees(family):
    target = made(family, **WINDOWS[family])
    check_model(target)
    draft = made(family, **WINDOWS[family])
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    prompts, most = some_prompts(4), [20, 9, 30, 14]
    expected = [alone(target, prompt, count) for prompt, count in zip(prompts, most, strict=True)]
    assert greedily(engine([target, draft], [(1, 2, 1)]), prompts, most) == expected


@pytest.mark.parametrize(
    ("family", "shape", "message"),
    [
        ("bert", USUAL | {"is_decoder": False}, "no causal model"),
        (
            "bart",
            {
                "d_model": 32,
                "encoder_layers": 2,
                "decoder_layers": 2,
                "decoder_attention_heads": 4,
                "decoder_ffn_dim": 64,
            },
            "differ",
        ),
        (
            "gpt_neo",
            {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
            "differ",
        ),
        ("rwkv", {"hidden_size": 32, "num_hidden_layers": 2, "context_length": 64}, "GENERAL"),
        ("mpt", {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}, "differ"),
        ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}, "limit of its positions"),
        ("xlnet", {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}, "GENERAL"),
        ("falcon", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True}, "GENERAL"),
    ],
)
def test_what_would_answer_wrongly_is_refused_by_name(family, shape, message):
    target = made(family, **shape)
    with pytest.raises(TaskError, match="" if message == "GENERAL" else message) as refused:
        check_model(target)
    assert type(target).__name__ in str(refused.value)


def test_a_difference_of_any_way_is_found():
    from megatron.fill.wings.llm.passes import ModelRunner

    target, plain = model(), ModelRunner._inputs

    def wrong_positions(self, rows):
        inputs = plain(self, rows)
        if any(row.held is not None for row in rows):
            inputs["position_ids"] = torch.full_like(inputs["position_ids"], 3)
        return inputs

    check_model(target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "_inputs", wrong_positions)
        with pytest.raises(TaskError, match=r"with a token tree its logits differ .* by [0-9.]+ of their spread"):
            check_model(target)


def test_a_model_is_refused_if_it_gives_no_finite_logits_at_all():
    target = model()
    with torch.no_grad():
        target.get_input_embeddings().weight[7] = float("nan")  # one token of the many
        check_finite(target)
        target.model.norm.weight[0] = float("nan")
    check_model(target)  # it is computed as it is
    with pytest.raises(TaskError, match=r"LlamaForCausalLM are not finite numbers .* expected finite weights"):
        check_finite(target)


def test_the_check_leaves_nothing_at_the_model():
    target = model()
    before = {name: value.clone() for name, value in target.state_dict().items()}
    check_model(target)
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())
    assert not any(module._forward_pre_hooks for module in target.modules())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_not_taken_for_a_difference(dtype, monkeypatch):
    target = model("qwen3", layers=6, hidden=64).to(getattr(torch, dtype))
    check_model(target)
    monkeypatch.setattr("megatron.fill.wings.llm.selfcheck._COPIED", 0)
    check_model(target)
    assert target.dtype == getattr(torch, dtype)


def test_rope_that_changes_beyond_a_length_limits_the_context_and_says_so():
    shape = USUAL | {"num_key_value_heads": 2, "max_position_embeddings": 192, "original_max_position_embeddings": 64}
    target = made("phi3", **shape, rope_parameters=ROPE | {"original_max_position_embeddings": 64})
    found = attention.context_of(target)
    assert found.tokens == 64
    assert "original_max_position_embeddings" in (found.reason or "")
    check_model(target)
    with pytest.MonkeyPatch.context() as patch:  # and were it not limited, the check would find it
        patch.setattr(attention, "_CHANGING_ROPES", ())
        with pytest.raises(TaskError, match="differ"):
            check_model(target)


def test_the_marks_of_a_config_are_its_windows_chunks_and_original_lengths():
    assert attention.marks(made("mistral", **WINDOWS["mistral"])) == [12]
    assert attention.marks(made("llama4_text", **WINDOWS["llama4_text"]))[0] == 12
    assert attention.marks(model()) == []


def test_masks_of_a_tree_go_by_places_and_not_by_columns():
    import numpy as np

    kinds = {"full_attention": 0, "sliding_attention": 3, "chunked_attention": 4}
    source = random.Random(3)
    queries = np.array([[source.randrange(20) for _ in range(5)]])
    columns = np.array([[source.randrange(20) for _ in range(9)]])
    visible = np.ones((1, 1, 5, 9), dtype=bool)
    masks = attention.attention_masks(kinds, visible, queries, columns)
    for q in range(5):
        for c in range(9):
            query, column = queries[0, q], columns[0, c]
            assert masks["full_attention"][0, 0, q, c]
            assert masks["sliding_attention"][0, 0, q, c] == (query - column < 3)
            assert masks["chunked_attention"][0, 0, q, c] == (query // 4 == column // 4)

"""The comparison of all families of models: tiny configs, what it calls equal, refused and different."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("greenlet")

from tests.wings.llm.families import check, compared, tiny  # noqa: E402
from tests.wings.llm.families.compared import DIFFERS, EQUAL, NOT_BUILT, REFUSED, WAYS, compare  # noqa: E402


def test_the_families_are_those_of_the_library():
    found = tiny.families()
    assert len(found) > 100
    assert found["llama"] == "LlamaForCausalLM"


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3"])
def test_a_tiny_model_is_small_seeded_and_of_all_kinds_of_layers(family):
    made, again, other = (tiny.tiny_model(family, seed) for seed in (0, 0, 1))
    assert sum(one.numel() for one in made.parameters()) < 1_000_000
    pairs = list(zip(made.parameters(), again.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(one, same) for one, same, _ in pairs)
    assert not all(torch.equal(one, another) for one, _, another in pairs)
    if family == "gemma3_text":
        assert set(made.config.layer_types) == {"full_attention", "sliding_attention"}
        assert made.config.sliding_window == tiny.WINDOW < min(WAYS["long"].prompts)
    if family == "deepseek_v3":  # keys are as wide as the parts with and without rotation together
        assert made.model.layers[0].self_attn.kv_a_proj_with_mqa.out_features == 32 + 8


def test_a_family_without_a_fitting_config_says_why(monkeypatch):
    monkeypatch.setattr(tiny, "_MOST", 10)
    assert compare("llama").status == NOT_BUILT
    assert "parameters" in compare("llama").reason


def test_a_family_is_equal_in_all_ways_refused_or_different(monkeypatch):
    begun: list[str] = []
    equal = compare("llama", begun.append)
    assert (equal.status, equal.reason, equal.ties) == (EQUAL, "", 0)
    assert equal.ways == dict.fromkeys(WAYS, EQUAL)
    assert begun[-1] == list(WAYS)[-1]
    refused = compare("rwkv")
    assert refused.status == REFUSED
    assert "RwkvForCausalLM" in refused.reason
    plain = compared.engine_tokens
    monkeypatch.setattr(compared, "WAYS", {"alone": WAYS["alone"], "long": WAYS["long"]})

    def wrong(models, prompts, way):
        tokens = plain(models, prompts, way)
        if way == WAYS["long"]:
            tokens[0][4] ^= 1
        return tokens

    monkeypatch.setattr(compared, "engine_tokens", wrong)
    differs = compare("llama")
    assert differs.status == DIFFERS
    assert differs.ways["alone"] == EQUAL
    assert "new token 4 is" in differs.ways["long"]


def test_results_are_kept_for_the_same_versions_only(tmp_path):
    file, versions = tmp_path / "models.json", {"transformers": "1"}
    assert check.earlier(file, versions) == {}
    file.write_text(json.dumps({"versions": versions, "families": {"llama": {"status": EQUAL}}}))
    assert list(check.earlier(file, versions)) == ["llama"]
    assert check.earlier(file, {"transformers": "2"}) == {}
    file.write_text("[]")
    with pytest.raises(ValueError, match="no versions and families"):
        check.earlier(file, versions)

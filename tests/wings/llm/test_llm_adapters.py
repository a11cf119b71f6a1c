"""LoRA adapters: the answers are those of the adapted model, as its library has it; what is no adapter is refused."""

from __future__ import annotations

import json
import shutil

import pytest

from megatron.fill.errors import TaskError
from tests.support.small_models import LETTERS, alone, folder, model
from tests.wings.llm.test_llm_batch import answers, job, request, run, write

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from megatron.fill.wings.llm.models import merge_adapter  # noqa: E402
from tests.wings.llm.test_llm_selfcheck import USUAL, made  # noqa: E402


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of an adapter that changes what is generated, and the model of its library with it."""
    folder = tmp_path_factory.mktemp("adapters") / "mine"
    base = made("llama", **USUAL, num_key_value_heads=2)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False
    )
    torch.manual_seed(3)
    adapted = peft.get_peft_model(base, config)
    adapted.save_pretrained(folder)
    return folder, adapted.eval()


def base():
    return made("llama", **USUAL, num_key_value_heads=2)


def test_the_merged_model_generates_what_the_adapted_one_does(saved):
    folder, adapted = saved
    merged, plain = merge_adapter(base(), folder), base()
    assert type(merged) is type(plain)
    prompt = list(range(1, 9))
    assert alone(merged, prompt, 20) == alone(adapted, prompt, 20) != alone(plain, prompt, 20)


def broken(saved, tmp_path, change):
    folder = tmp_path / "broken"
    shutil.copytree(saved[0], folder)
    change(folder)
    return folder


def test_an_adapter_that_lacks_tensors_is_refused(saved, tmp_path):
    from safetensors.torch import load_file, save_file

    def drop(folder):
        tensors = load_file(folder / "adapter_model.safetensors")
        tensors.pop(next(name for name in tensors if "v_proj.lora_B" in name))
        save_file(tensors, folder / "adapter_model.safetensors")

    with pytest.raises(TaskError, match=r"broken does not fit the model: .*v_proj"):
        merge_adapter(base(), broken(saved, tmp_path, drop))


def test_an_adapter_of_another_model_is_refused(saved):
    other = made("llama", **USUAL | {"hidden_size": 64}, num_key_value_heads=2)
    with pytest.raises(TaskError, match=r"mine does not fit the model: .*size mismatch"):
        merge_adapter(other, saved[0])
    with pytest.raises(TaskError, match=r"mine does not fit the model: .*q_proj"):
        merge_adapter(made("gpt2", n_embd=32, n_layer=2, n_head=4, n_positions=64), saved[0])


def test_an_adapter_of_a_deeper_model_is_refused(tmp_path):
    deeper = peft.get_peft_model(made("llama", **USUAL | {"num_hidden_layers": 4}), peft.LoraConfig(r=2))
    deeper.save_pretrained(tmp_path / "deeper")
    with pytest.raises(TaskError, match=r"deeper does not fit the model: the model lacks .*layers\.2\..* more"):
        merge_adapter(made("llama", **USUAL), tmp_path / "deeper")


def test_another_kind_of_adapter_is_refused_by_name(saved, tmp_path):
    def change(folder):
        config = json.loads((folder / "adapter_config.json").read_text())
        kept = {name: config[name] for name in ("base_model_name_or_path", "target_modules", "task_type")}
        (folder / "adapter_config.json").write_text(json.dumps(kept | {"peft_type": "IA3", "feedforward_modules": []}))

    with pytest.raises(TaskError, match="of the kind IA3: expected LORA"):
        merge_adapter(base(), broken(saved, tmp_path, change))


def test_a_folder_without_an_adapter_is_named(tmp_path):
    with pytest.raises(TaskError, match=r"expected a folder with adapter_config\.json"):
        merge_adapter(base(), tmp_path)


def test_a_job_answers_with_the_adapter_and_by_its_name(tmp_path):
    plain = model()
    target = folder(tmp_path / "target", plain)
    torch.manual_seed(4)
    modules = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False}
    adapted = peft.get_peft_model(plain, peft.LoraConfig(**modules, fan_in_fan_out=True)).eval()
    adapted.save_pretrained(tmp_path / "polite")
    requests = write(tmp_path / "in.jsonl", [request(0, prompt=LETTERS[:9], max_tokens=12, temperature=0)])
    assert run(job((target, target), requests, tmp_path / "job", adapter=str(tmp_path / "polite")))[1]
    body = answers(tmp_path / "job")["r0"]["body"]
    expected = "".join(LETTERS[token] for token in alone(adapted, list(range(9)), 12))
    assert body["choices"][0]["text"] == expected.split(".")[0]
    assert body["model"] == "polite"

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron.fill.errors import TaskError
from megatron.fill.models import MODELS
from megatron.fill.sidetask import models
from megatron.fill.sidetask.inference import BatchInferenceJob
from megatron.fill.sidetask.training import TrainingJob
from tests.support.drive import drive
from tests.support.extras import needs

pq = pytest.importorskip("pyarrow.parquet", reason="needs the extra models")
needs("transformers", "models")
needs("timm", "models")
# Tiny, both BERTs are the same model.
NAMES = [name for name in models.MODELS if name != "bert-large"]
TINY = {"model_args": {"size": "tiny"}, "data_args": {"samples": 6}}


@pytest.mark.parametrize("name", NAMES)
def test_training_in_pieces_is_training_whole_bit_for_bit(tmp_path, name):
    args = {"model": name, **TINY, "batch_size": 4, "steps": 2}
    pieces = drive(TrainingJob, tmp_path, pieces=5, **args)
    whole = drive(TrainingJob, tmp_path, split="whole", **args)
    assert pieces.split == "torch.export, 5 pieces"
    others = whole.model.state_dict()
    assert [k for k, v in pieces.model.state_dict().items() if not torch.equal(v, others[k])] == []


@pytest.mark.parametrize("name", NAMES)
def test_inference_in_pieces_is_inference_whole(tmp_path, name):
    outputs = []
    for way in ("export", "whole"):
        args = {"model": name, **TINY, "batch_sizes": [4], "pieces": 5, "split": way}
        task = drive(BatchInferenceJob, tmp_path / way, **args)
        outputs.append(np.array(pq.read_table(tmp_path / way / "output.parquet").to_pydict()["output"]))
        assert task.split.startswith("torch.export, 5" if way == "export" else "whole")
    assert np.array_equal(outputs[0], outputs[1])


@pytest.mark.parametrize("name", MODELS)
def test_the_table_has_the_parameters_of_what_is_built(name):
    with torch.device("meta"):
        model = models.build_model(name)
    assert sum(p.numel() for p in model.parameters()) == MODELS[name].parameters


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    with pytest.raises(TaskError, match=r"timm is missing .* pip install 'pipefill\[models\]'"):
        models.build_model("swin-large", "tiny")


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("bert-base", {"size": "huge"}, "size is 'huge': expected 'full' or 'tiny'"),
        ("bert-base", {"width": 3}, "model_args of bert-base: unknown width"),
        ("efficientnet-b4", {"width": 3}, "model_args of efficientnet-b4: "),
    ],
)
def test_wrong_arguments(name, args, message):
    with pytest.raises(ValueError, match=message):
        models.build_model(name, **args)

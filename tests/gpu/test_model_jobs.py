"""Model jobs on a CUDA device: every configuration, offload included, learns the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.fill.device.meter import CudaMeter, fingerprint
from megatron.fill.profiles import Configuration
from megatron.fill.sidetask.base import TaskContext
from megatron.fill.sidetask.training import TrainingJob

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cuda:0"
# Not AdamW: it makes whole steps of its learning rate of gradients that are zero but for rounding, BERT's key biases.
ARGS: dict[str, Any] = {
    "model": "bert-base",
    "model_args": {"size": "tiny", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "optimizer": "torch.optim:SGD",
    "optimizer_args": {"lr": 0.1, "momentum": 0.9},
    "batch_size": 4,
    "steps": 3,
    "pieces": 4,
}


def trained(folder: Path, configuration: Configuration | None) -> dict[str, torch.Tensor]:
    task = TrainingJob()
    task.context = TaskContext("bert", folder, DEVICE)
    task.create(**ARGS)
    if configuration is not None:
        task.configure(configuration)
    task.init()
    nodes = 0
    while nodes < 1000:
        try:
            task.run_next_step()
        except StopIteration:
            break
        nodes += 1
    assert 0 < nodes < 1000
    return {name: value.cpu() for name, value in task.model.state_dict().items()}


def test_no_configuration_changes_what_is_learnt(tmp_path):
    task = TrainingJob()
    task.context = TaskContext("bert", tmp_path, DEVICE)
    task.create(**ARGS)
    reference = trained(tmp_path, None)
    for configuration in task.configurations():
        found = trained(tmp_path, configuration)
        for name, value in reference.items():
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4, msg=f"{configuration}: {name}")


def test_the_meter_waits_for_the_device():
    meter = CudaMeter("cuda:0")
    large = torch.randn(4096, 4096, device="cuda:0")
    meter.start()
    for _ in range(20):
        large @ large
    duration_ns, peak_bytes = meter.stop()
    assert duration_ns > 1_000_000
    assert peak_bytes >= 2 * large.nbytes
    assert torch.cuda.get_device_name(0) in fingerprint("cuda:0")

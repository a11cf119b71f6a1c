"""Processes that a rank starts on the CPU backend, and what its checkpoints are written from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.patches.fresh import python

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU backend is for machines without CUDA")

SCRIPT = """
import json, multiprocessing
from types import SimpleNamespace

def ask(answers):
    import torch
    torch.cuda.set_device(3 % torch.cuda.device_count())
    answers.put(torch.zeros(1, device="cuda").device.type)

def devices(method, count):
    context = multiprocessing.get_context(method)
    answers = context.Queue()
    children = [context.Process(target=ask, args=(answers,)) for _ in range(count)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    return [answers.get(timeout=9) for child in children if child.exitcode == 0]

def written():
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
    from torch.distributed.checkpoint.filesystem import _StoragePrefix
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    weight = torch.ones(2)
    chunk = ChunkStorageMetadata(torch.Size([0]), weight.size())
    data = TensorWriteData(chunk, TensorProperties(dtype=weight.dtype), weight.size())
    item = WriteItem(MetadataIndex("weight"), WriteItemType.TENSOR, tensor_data=data)
    plan = SimpleNamespace(storage_data=_StoragePrefix("0"), items=[item])
    writer = FileSystemWriterAsync("nowhere")
    writer.prepare_write_data(plan, SimpleNamespace(resolve_data=lambda _: weight))
    weight += 1  # the optimizer's next step
    return writer.write_buckets[0][2][1][0][1].tolist()

if __name__ == "__main__":
    import torch
    from pipefill_patches.cpu_backend import PATCH
    PATCH.apply()
    print(json.dumps({"forked": devices("fork", 2), "served": devices("forkserver", 1), "written": written()}))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    script: Path = tmp_path_factory.mktemp("processes") / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    result = python(str(script), megatron=True)
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout.splitlines()[-1])


def test_processes_that_a_rank_starts_have_the_backend(found):
    assert (found["forked"], found["served"]) == (["cpu", "cpu"], ["cpu"])


def test_a_checkpoint_is_written_from_a_copy(found):
    assert found["written"] == [1.0, 1.0]

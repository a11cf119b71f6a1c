"""What the CPU backend adds to Megatron's local layers computes what is computed without sequences being cut."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.patches.fresh import python

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU backend is for machines without CUDA")

CODE = """
import sys
import numpy as np
import torch
from pipefill_patches.cpu_backend import PATCH
PATCH.apply()
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.moe.token_dispatcher import maybe_move_tensor_to_cpu
from megatron.core.transformer.torch_norm import WrappedTorchNorm

rank = int(sys.argv[2])
torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
parallel_state.initialize_model_parallel(context_parallel_size=2)
model_parallel_cuda_manual_seed(1)
sizes = dict(num_layers=1, hidden_size=16, num_attention_heads=4, attention_dropout=0.0)
mask = torch.ones(8, 8).tril() < 0.5
rows = torch.tensor([0, 1, 6, 7] if rank == 0 else [2, 3, 4, 5])  # of four chunks the first and last, or those between

def attend(cp, query, key, value, mask):
    config = TransformerConfig(**sizes, context_parallel_size=cp)
    attention = DotProductAttention(config, 1, AttnMaskType.causal, "self")
    return attention(query, key, value, mask[None, None])

torch.manual_seed(1)
whole = [torch.randn(8, 2, 4, 4, requires_grad=True) for _ in "qkv"]
weights = torch.randn(8, 2, 16)
part = [tensor.detach()[rows].requires_grad_() for tensor in whole]
expected, found = attend(1, *whole, mask), attend(2, *part, mask[rows])
torch.testing.assert_close(found, expected[rows])
(expected * weights).sum().backward()
(found * weights[rows]).sum().backward()
for one, other in zip(part, whole):
    torch.testing.assert_close(one.grad, other.grad[rows])

wide = [torch.randn(8, 2, 4, width, requires_grad=True) for width in (6, 6, 2)]  # as latent attention has them
config = TransformerConfig(**sizes, context_parallel_size=1)
latent = DotProductAttention(config, 1, AttnMaskType.causal, "self", k_channels=6, v_channels=2)
assert config.kv_channels == latent.config.kv_channels == 4
found = latent(*wide, mask[None, None])
heads = [tensor.permute(1, 2, 0, 3) for tensor in wide]
expected = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True).permute(2, 0, 1, 3).reshape(8, 2, 8)
torch.testing.assert_close(found, expected)
of_found = torch.autograd.grad(found.square().sum(), wide)
for one, other in zip(of_found, torch.autograd.grad(expected.square().sum(), wide)):
    torch.testing.assert_close(one, other)

for cut in (False, True):
    config = TransformerConfig(**sizes, tensor_model_parallel_size=2, sequence_parallel=cut)
    norm = WrappedTorchNorm(config, 16)
    assert [weight.sequence_parallel for weight in norm.parameters()] == [cut, cut]
    assert config.sequence_parallel is cut

assert isinstance(maybe_move_tensor_to_cpu(torch.ones(2), as_numpy=True), np.ndarray)
assert isinstance(maybe_move_tensor_to_cpu(torch.ones(2)), torch.Tensor)
"""


def test_layers_on_two_ranks(tmp_path):
    def run(rank: str) -> subprocess.CompletedProcess[str]:
        environ = {"RANK": rank, "LOCAL_RANK": rank, "GLOO_SOCKET_IFNAME": "lo"}
        return python("-c", CODE, str(tmp_path / "meet"), rank, megatron=True, **environ)

    with ThreadPoolExecutor(2) as pool:
        for done in pool.map(run, ["0", "1"]):
            assert done.returncode == 0, done.stderr

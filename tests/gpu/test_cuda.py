"""What needs a CUDA device.  Without one every test here skips and says so."""

from __future__ import annotations

import pytest
import torch

from megatron.fill.device.cuda import cap_memory
from megatron.fill.device.meter import free_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_free_memory_is_what_the_driver_says():
    free = free_bytes("cuda:0")
    assert 0 < free <= torch.cuda.get_device_properties(0).total_memory


def test_the_memory_cap_binds():
    cap_memory("cuda:0", 256 << 20)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(512 << 20, dtype=torch.uint8, device="cuda:0")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)

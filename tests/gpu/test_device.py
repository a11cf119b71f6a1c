"""The limits of a worker on a real GPU.  Without one every test here skips and says so."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megatron.fill.device import cuda
from megatron.fill.device.cuda import CudaDevice
from megatron.fill.device.mps import PROGRAM, MpsDaemon
from megatron.fill.device.port import Limits

MIB = 2**20
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def start(code: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    program = f"import time, torch\n{code}"
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
        env=os.environ | environment,
    )


def test_the_driver_tells_the_free_memory():
    device = cuda.CudaDevice("cuda:0")
    total = torch.cuda.get_device_properties(0).total_memory
    assert 0 < device.free_bytes() <= total
    assert isinstance(device, CudaDevice)
    assert device.uuid.endswith(str(torch.cuda.get_device_properties(0).uuid))


def test_the_cap_in_the_environment_makes_an_allocation_fail():
    limiter = cuda.CudaDevice("cuda:0").limiter(Limits(memory_bytes=256 * MIB), f"gpu-{os.getpid()}")
    if "PYTORCH_ALLOC_CONF" not in limiter.environment:
        pytest.skip("this PyTorch takes no cap from its environment")
    worker = start("torch.empty(512 << 20, dtype=torch.uint8, device='cuda')", limiter.environment)
    limiter.adopt(worker.pid)
    output, _ = worker.communicate(timeout=120)
    limiter.close()
    assert "OutOfMemoryError" in output


def test_memory_beside_the_allocator_is_seen():
    limiter = cuda.CudaDevice("cuda:0").limiter(Limits(memory_bytes=64 * MIB), f"gpu-{os.getpid()}")
    environment = {k: v for k, v in limiter.environment.items() if k != "PYTORCH_ALLOC_CONF"}
    code = "x = torch.empty(2 << 30, dtype=torch.uint8, device='cuda'); print('ready', flush=True); time.sleep(60)"
    worker = start(code, environment)
    limiter.adopt(worker.pid)
    assert worker.stdout is not None
    assert worker.stdout.readline() == "ready\n"
    reason = limiter.look()
    held = limiter.held_bytes
    limiter.kill()
    worker.communicate()
    limiter.close()
    if not held:
        pytest.skip("the driver names processes by pids that are not ours")
    assert "over its cap of 64 MiB" in reason


def test_settling_waits_for_kernels():
    x = torch.randn(4096, 4096, device="cuda")
    for _ in range(50):
        x = x @ x / 64
    cuda.synchronize("cuda:0")
    assert torch.cuda.current_stream().query()


def test_a_green_context_runs_kernels():
    code = (
        "from megatron.fill.device import cuda\n"
        "from megatron.fill.device.port import Limits, Sharing\n"
        "print(cuda.enter('cuda:0', Limits(sm_percentage=25), Sharing.TIMESLICE))\n"
        "print(float(torch.ones(1000, device='cuda').sum()))"
    )
    output, _ = start(code, {}).communicate(timeout=120)
    lacking, total = output.splitlines()[-2:]
    assert total == "1000.0"
    if lacking:
        pytest.skip(lacking)


@pytest.mark.skipif(shutil.which(PROGRAM) is None, reason=f"needs {PROGRAM}")
def test_mps_caps_a_client_s_memory_and_takes_it_off_the_gpu(tmp_path: Path):
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    daemon = MpsDaemon.start(tmp_path, [uuid], os.getpid())
    try:
        device = cuda.CudaDevice("cuda:0", daemon, uuid)
        limiter = device.limiter(Limits(memory_bytes=1024 * MIB), f"gpu-{os.getpid()}")
        environment = {k: v for k, v in limiter.environment.items() if k != "PYTORCH_ALLOC_CONF"}
        code = (
            "try:\n    torch.empty(4 << 30, dtype=torch.uint8, device='cuda')\n"
            "except torch.OutOfMemoryError:\n    print('refused', flush=True)\n"
            "time.sleep(60)"
        )
        worker = start(code, environment)
        limiter.adopt(worker.pid)
        assert worker.stdout is not None
        assert worker.stdout.readline() == "refused\n"
        assert worker.pid in daemon.clients()
        began_s = time.monotonic()
        limiter.kill()
        assert time.monotonic() - began_s < 1
        assert worker.wait(5) < 0
        limiter.close()
    finally:
        daemon.stop()

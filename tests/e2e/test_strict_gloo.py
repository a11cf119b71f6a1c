"""All stages of bench_gpu's model on one device, over a gloo that does with CPU tensors what it does with CUDA's."""

from __future__ import annotations

import argparse
import math
import os
import re
import subprocess
import sys
from pathlib import Path

from scripts.benchmarks.gpu_parts import Bench

ROOT = Path(__file__).resolve().parents[2]
# ProcessGroupGloo has these for CPU tensors only; of CUDA tensors it sends and receives none.
RANK = """
import runpy
import sys
import torch
import torch.distributed as dist
import pipefill_patches
from megatron.fill.app.launch import launch
from pipefill_patches import host_p2p

staged = set()
stage = host_p2p._stage
def remembering(tensor, received):
    copy, target = stage(tensor, received)
    staged.add(copy.data_ptr())
    return copy, target
host_p2p._stage = remembering
host_p2p._staged = lambda tensor: True

def refusing(name):
    def refuse(*args, **kwargs):
        raise RuntimeError(f"invalid argument: unsupported device type cuda in {name}")
    return refuse
for name in ("allreduce_coalesced", "alltoall", "alltoall_base", "reduce_scatter", "_reduce_scatter_base"):
    setattr(dist.ProcessGroup, name, refusing(name))
for name in ("send", "recv"):
    def checked(self, tensors, *args, original=getattr(dist.ProcessGroup, name), name=name):
        if any(tensor.data_ptr() not in staged for tensor in tensors):
            refusing(name)()
        return original(self, tensors, *args)
    setattr(dist.ProcessGroup, name, checked)
sys.argv = sys.argv[1:]
launch(lambda: runpy.run_path(sys.argv[0], run_name="__main__"))
"""


def train(tmp_path: Path, schedule: str, patched: bool) -> subprocess.CompletedProcess[str]:
    options = argparse.Namespace(
        model="tiny", stages=2, microbatches=4, schedule=schedule, distributed_timeout_minutes=1, extra=""
    )
    flags = Bench(options, "cpu", tmp_path, lambda: None).flags(3)
    script = tmp_path / "rank.py"
    script.write_text(RANK, encoding="utf-8")
    command = [sys.executable, str(ROOT / "tests" / "e2e" / "launch.py"), "2", str(script)]
    environment = os.environ | {"PIPEFILL_CPU_BACKEND": "1", "PIPEFILL_HOST_P2P": "1" if patched else "0"}
    environment["PYTHONPATH"] = str(ROOT)
    return subprocess.run(
        [*command, "pretrain_gpt.py", *flags],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def test_no_operation_that_gloo_lacks_for_cuda_tensors_is_used(tmp_path):
    for schedule in ("1f1b", "interleaved"):
        done = train(tmp_path, schedule, patched=True)
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
        losses = [float(loss) for loss in re.findall(r"lm loss: (\S+)", done.stdout)]
        assert len(losses) == 3
        assert all(map(math.isfinite, losses))


def test_without_the_patch_such_an_operation_is_refused(tmp_path):
    done = train(tmp_path, "1f1b", patched=False)
    assert done.returncode != 0
    assert "unsupported device type cuda" in done.stdout + done.stderr

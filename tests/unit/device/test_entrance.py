"""When a worker enters its limits on a GPU: after the task brought PyTorch, before it uses the device.

Each test is a process of its own, because PyTorch must not be there yet.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PRELUDE = """
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

from megatron.fill.device import cuda
from megatron.fill.device.port import Limits
from megatron.fill.work import Work
from megatron.fill.worker.spec import WorkerSpec
from megatron.fill.worker import worker as module
from megatron.fill.worker.pacing import StepDevice, at_once
from megatron.fill.worker.worker import TaskRun
from megatron.fill.sandbox.config import Sandbox
from tests.support.fakes import FakeGate, shared_pages, worker_spec

assert "torch" not in sys.modules
module.Pacer = lambda *_: SimpleNamespace(turn=at_once, aside=nullcontext)  # no bubble is waited for here
cuda.enter = lambda device, limits, sharing: print("limits:", device, limits.memory_bytes) or "a share: no"


class Bench(TaskRun):
    def __init__(self, folder, task, args):
        work = Work(task, args=args, search=(folder,))
        spec = worker_spec(folder, work, device="cuda:0", limits=Limits(memory_bytes=5))
        super().__init__(spec, *shared_pages(FakeGate()), lambda: True, StepDevice())

    def begin(self):
        return self.serve(self.new_machine(self.spec.context()), self.spec.profiles)
"""


def output(folder: Path, code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[3],
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_training_job_that_is_measured_is_capped_before_it_uses_the_device(tmp_path: Path) -> None:
    said = output(
        tmp_path,
        """
from megatron.fill.sidetask.training import TrainingJob


def init(self):
    print("init")
    sys.exit(0)


TrainingJob.init = init
args = {"model": "tests.unit.sidetask.test_training_job:net", "data": "tests.unit.sidetask.test_training_job:points",
        "loss": "torch.nn.functional:mse_loss", "steps": 1, "batch_size": 4}
Bench(sys.argv[1], "megatron.fill.sidetask.training:TrainingJob", args).begin()
""",
    )
    assert said.splitlines() == ["limits: cuda:0 5", "init"]


PLAIN = """
class Task(SideTask):
    def create(self):
        {create}
    def init(self):
        {init}
        print("init")
    def run_next_step(self):
        raise StopIteration
"""


@pytest.mark.parametrize(
    ("create", "init", "expected"),
    [
        ("import torch", "pass", ["limits: cuda:0 5", "said a share: no", "init"]),
        ("pass", "import torch", ["init", "limits: cuda:0 5", "said a share: no"]),
        ("pass", "pass", ["init", "said the task has not imported PyTorch"]),
    ],
)
def test_a_plain_task_is_capped_when_it_brings_pytorch(
    tmp_path: Path, create: str, init: str, expected: list[str]
) -> None:
    module = "from megatron.fill.sidetask.base import SideTask\n" + PLAIN.format(create=create, init=init)
    (tmp_path / "plain.py").write_text(module, encoding="utf-8")
    (tmp_path / "torch.py").write_text("cuda = None\n", encoding="utf-8")  # quick to import
    said = output(
        tmp_path,
        """
cuda.logger = SimpleNamespace(info=lambda text: print("said", text))
sys.path.insert(0, sys.argv[1])
assert not Bench(sys.argv[1], "plain:Task", {}).begin()
""",
    )
    lines = said.splitlines()
    assert len(lines) == len(expected)
    assert all(line.startswith(beginning) for line, beginning in zip(lines, expected, strict=True))

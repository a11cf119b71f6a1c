"""The CPU backend, each case in a process of its own: it changes torch for all of the process."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import torch

from tests.patches.fresh import python

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU backend is for machines without CUDA")

BEFORE = "from pipefill_patches.cpu_backend import PATCH\nPATCH.apply()\n"
AFTER = "import megatron.core, megatron.training.training\n" + BEFORE
LINE = "PipeFill: no CUDA device: Megatron runs on the CPU over gloo, one core per rank\n"


def run(code: str, /, *, megatron: bool = False, **environ: str) -> subprocess.CompletedProcess[str]:
    result = python("-c", code, megatron=megatron, **environ)
    assert result.returncode == 0, result.stderr
    return result


USE = """
import threading, torch, types
assert torch.zeros(1, device="cuda").device.type == "cpu"
assert torch.zeros(1, device=torch.cuda.current_device()).to("cuda:0").device.type == "cpu"
assert torch.zeros(1).cuda().type() == "torch.cuda.FloatTensor"
assert torch.normal(0.0, 1.0, (2,), device="cuda").device == torch.fft.fftfreq(4, device="cuda").device
made = []
thread = threading.Thread(target=lambda: made.append(torch.zeros(1, device="cuda").new_ones(1, device="cuda:0")))
thread.start()
thread.join()
assert made[0].device.type == "cpu"
# Whatever makes a tensor on a device, by torch's own list of operations.
takes_device = {
    schema.name.removeprefix("aten::")
    for schema in torch._C._jit_get_all_schemas()
    if schema.name.startswith("aten::") and any(argument.name == "device" for argument in schema.arguments)
}
others = {"Generator", "is_pinned"}
for owner in (torch, torch.Tensor):
    for name in sorted(takes_device - others):
        function = getattr(owner, name, None)
        assert name[0] == "_" or function is None or isinstance(function, types.FunctionType), (owner, name)
torch.ones(2, pin_memory=True).pin_memory().record_stream(torch.cuda.current_stream())
with torch.cuda.stream(torch.cuda.Stream()) as stream:
    torch.cuda.synchronize()
event = torch.cuda.Event(enable_timing=True)
event.record()
assert event.elapsed_time(torch.cuda.current_stream().record_event()) >= 0
assert torch.cuda.is_available() and torch.cuda.device_count() == 1 and not torch.accelerator.is_available()
assert torch.cuda.max_memory_allocated() > 0 and torch.cuda.memory_stats()["reserved_bytes.all.current"] > 0
assert torch.cuda.device_memory_used() > 0
assert {getattr(torch.cuda, name)() for name in ("clock_rate", "power_draw", "temperature", "utilization")} == {0}

class Double(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x * 2)
    backward = staticmethod(lambda ctx, grad: grad * torch.full_like(grad, 2.0, device="cuda"))

x = torch.ones(3, requires_grad=True)
Double.apply(x).sum().backward()
torch.autograd.backward(Double.apply(x).sum())
assert torch.autograd.grad(Double.apply(x).sum(), x)[0].tolist() == [2.0] * 3
assert x.grad.tolist() == [4.0] * 3
compiled = torch.compile(lambda x: x + 1, backend=lambda *_: 1 / 0)
assert compiled(x).tolist() == [2.0] * 3
from megatron.core.datasets.utils import compile_helpers
compile_helpers()
from megatron.core.energy_monitor import EnergyMonitor
energy = EnergyMonitor()
energy.setup()
assert energy.lap() == energy.get_total() == 0
"""

REVERT = """
import contextlib, inspect, logging, os, torch, torch.cuda.random, torch.utils.data.dataloader as dataloader
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
import megatron.training.arguments as arguments, megatron.core.datasets.utils as utils
import megatron.core.energy_monitor as energy_monitor
from megatron.core.tensor_parallel import random
torch.compiler.set_stance("default")
torch.set_num_threads(2)

holders = (torch, torch.Tensor, torch.fft, torch.nested, torch.cuda, torch.cuda.random, torch.accelerator,
           torch.distributed, torch.distributed.distributed_c10d, arguments, utils, random, energy_monitor,
           DistributedOptimizer)

def state():
    # The torch modules keep lazily made values of their own in names that begin with an underscore.
    ours = ("_set_main_param_and_optimizer_states",)
    names = [{n: v for n, v in vars(h).items() if n[0] != "_" or n in ours} for h in holders]
    import torch._dynamo.eval_frame as eval_frame
    return [*names, dataloader._BaseDataLoaderIter.__init__, logging.getLogger(random.__name__).filters[:],
            os.sched_getaffinity(0), torch.get_num_threads(), eval_frame._stance]

before = state()
from pipefill_patches.cpu_backend import PATCH, needed
assert needed() and not PATCH.applied
for _ in range(2):
    PATCH.apply()
    PATCH.apply()
    assert PATCH.applied and needed() and len(os.sched_getaffinity(0)) == 1 and torch.get_num_threads() == 1
    changed = {h for h, a, b in zip(holders, before, state()) if a != b}
    assert changed == set(holders) - {random}
    PATCH.revert()
    PATCH.revert()
    after = state()
    for old, new in zip(before, after, strict=True):
        assert old == new, (old, new)
assert not torch.cuda.is_available()
try:
    torch.zeros(1, device="cuda")
except (AssertionError, RuntimeError):
    pass
else:
    raise SystemExit("CUDA is still there")
"""

RNG = """
import logging, torch
from megatron.core.tensor_parallel import random
random._CUDA_RNG_STATE_TRACKER = None
tracker = random.get_cuda_rng_tracker()
warnings = []
handler = logging.Handler()
handler.emit = warnings.append
logging.getLogger(random.__name__).addHandler(handler)

torch.manual_seed(1)
torch.cuda.manual_seed(1)
draws = torch.rand(3)
torch.manual_seed(1)
tracker.add("inner", 7)
assert torch.equal(torch.rand(3), draws), "adding a state moved the generator"

torch.manual_seed(7)
expected = torch.rand(6)
torch.manual_seed(1)
with tracker.fork("inner"):
    first = torch.rand(3)
assert torch.equal(torch.rand(3), draws), "the outer state came back after the fork"
with tracker.fork("inner"):
    second = torch.nn.functional.dropout(torch.ones(8))
torch.manual_seed(7)
assert torch.equal(torch.rand(3), first)
assert torch.equal(torch.nn.functional.dropout(torch.ones(8)), second), "the forked state went on where it stopped"

state = torch.cuda.get_rng_state()
assert torch.equal(state, torch.get_rng_state())
x = torch.rand(3)
torch.cuda.set_rng_state(state)
assert torch.equal(torch.rand(3), x)

def layer(x):
    with tracker.fork("inner"):
        x = torch.nn.functional.dropout(x)
    return torch.nn.functional.dropout(x, 0.2)

def gradient(recompute):
    torch.manual_seed(3)
    tracker.set_states({"inner": random._get_cuda_rng_state()})
    x = torch.ones(1000, requires_grad=True)
    y = random.checkpoint(layer, False, x) if recompute else layer(x)
    after = torch.rand(1)
    y.sum().backward()
    assert torch.equal((y > 0), (x.grad > 0))
    return x.grad, after, torch.rand(1), tracker.get_states()["inner"]

assert all(torch.equal(a, b) for a, b in zip(gradient(False), gradient(True)))

before = torch.get_rng_state()
list(torch.utils.data.DataLoader([1, 2]))
assert torch.equal(before, torch.get_rng_state()), "a data loader moved the model's generator"
assert not warnings, warnings[0].getMessage()
"""

PARSER = """
import argparse, megatron.training.arguments as arguments
from megatron.core.transformer.enums import AttnBackend
from megatron.fill.errors import ConfigError
parse = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args
args = parse([])
assert (args.distributed_backend, args.transformer_impl, args.num_workers) == ("gloo", "local", 0)
assert args.attention_backend is AttnBackend.unfused and args.use_cpu_initialization and args.no_persist_layer_norm
assert not (args.gradient_accumulation_fusion or args.masked_softmax_fusion or args.apply_rope_fusion)
args = parse(["--num-workers", "3", "--attention-backend", "flash", "--distributed-backend", "gloo"])
assert (args.num_workers, args.attention_backend) == (3, AttnBackend.flash)
try:
    parse(["--distributed-backend", "nccl"])
except ConfigError as error:
    assert "gloo" in str(error) and "--distributed-backend nccl" in str(error)
else:
    raise SystemExit("nccl was taken")
PATCH.revert()
args = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args([])
assert (args.distributed_backend, args.num_workers) == ("nccl", 2)
"""

GLOO = """
import os, torch, torch.distributed as dist
from datetime import timedelta

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=77))
before = len(os.listdir("/proc/self/task"))
groups = [dist.new_group([0]) for _ in range(5)]
more = len(os.listdir("/proc/self/task")) - before
assert more == 5 * 2, f"{more} threads of five groups: expected two of each, and none of a device of its own"
for group in (None, *groups):
    ones = torch.ones(3, device="cuda")
    dist.all_reduce(ones, group=group)
    assert ones.tolist() == [1.0] * 3 and dist.get_backend(group) == "gloo"
options = dist.group.WORLD._get_backend(torch.device("cpu")).options
assert options._timeout == timedelta(seconds=77)
dist.destroy_process_group()
PATCH.revert()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
before = len(os.listdir("/proc/self/task"))
dist.new_group([0])
assert len(os.listdir("/proc/self/task")) == before + 3
"""


def test_applied_before_megatron_is_imported() -> None:
    assert run(BEFORE + USE).stdout == LINE


def test_applied_after_megatron_is_imported_on_another_rank() -> None:
    core = "import os\ncores = sorted(os.sched_getaffinity(0))\n"
    pinned = "assert os.sched_getaffinity(0) == {cores[1 % len(cores)]}\n"
    assert run(core + AFTER + pinned + USE, megatron=True, RANK="1", LOCAL_RANK="1").stdout == ""


def test_more_ranks_than_cores_are_told_what_jobs_cost_them() -> None:
    said = run(BEFORE, LOCAL_WORLD_SIZE="9999").stdout
    assert said.startswith("PipeFill: no CUDA device: Megatron runs on the CPU over gloo, 9999 ranks on ")
    assert said.endswith("jobs take its time; expected a core for each rank\n")


def test_a_rank_that_srun_binds_has_a_core_of_its_own() -> None:
    one_core = "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    ranks: dict[str, Any] = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}
    srun = ranks | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_CPUS_PER_TASK": "1"}
    assert run(one_core + BEFORE, **srun).stdout == LINE
    # torchrun is one task, and its ranks share what that has
    for of_one_task in (ranks, srun | {"SLURM_STEP_NUM_TASKS": "1"}):
        assert " 2 ranks on 1 core: " in run(one_core + BEFORE, **of_one_task).stdout


def test_a_variable_that_is_empty_counts_as_unset() -> None:
    assert run(BEFORE, LOCAL_WORLD_SIZE="", LOCAL_RANK="", SLURM_NTASKS_PER_NODE="", SLURM_LOCALID="").stdout == LINE


LIKE_TORCH = """
import contextlib, os, torch.distributed as dist, torch.distributed.distributed_c10d as c10d
from datetime import timedelta
from pipefill_patches import cpu_gloo

def made(*given, **named):
    try:
        options = c10d.ProcessGroupGloo(dist.HashStore(), 0, 1, *given, **named).options
    except (RuntimeError, TypeError) as error:
        return type(error)
    return options._threads, len(options._devices), options._timeout

plain, ten = c10d.ProcessGroupGloo, timedelta(seconds=10)
options = plain._Options()
options._devices, options._threads, options._timeout = [plain.create_device(interface="lo")] * 3, 5, ten
found = {}
for names in ("", "lo", "lo,lo", "lo,", ",lo", "lo,,", "not-there"):
    os.environ["GLOO_SOCKET_IFNAME"] = names
    with contextlib.ExitStack() as stack:
        for shares in (False, True):
            if shares:
                cpu_gloo.install(stack)
            assert (c10d.ProcessGroupGloo is plain) is not shares
            found[shares] = [
                made(ten), made(timeout=ten), made(), made(options), made(10), made(ten, ten), made(ten, not_there=True)
            ]
    assert found[True] == found[False], (names, found)
    if names == "lo,lo":
        assert found[True][0] == (4, 2, ten) and found[True][-1] is TypeError, found
assert c10d.ProcessGroupGloo is plain
"""


def test_groups_that_share_a_device_are_as_torch_makes_them() -> None:
    assert run(LIKE_TORCH).stdout == ""


def test_it_is_idempotent_and_reverts_to_the_initial_state() -> None:
    lines = run(REVERT, megatron=True).stdout.splitlines(keepends=True)
    assert "".join(line for line in lines if "was tested with" not in line) == LINE * 2


@pytest.mark.parametrize("environ", [{}, {"GLOO_SOCKET_IFNAME": "lo"}])
def test_process_groups_share_a_device(environ) -> None:
    run(BEFORE + GLOO, **environ)


def test_rng_helpers_use_the_cpu_generator_and_parser_defaults_suit_the_cpu() -> None:
    run(BEFORE + RNG + PARSER)

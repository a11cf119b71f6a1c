"""Captures of CUDA graphs, which reserve memory, are disturbances, and Megatron's own timers are read."""

from __future__ import annotations

from tests.patches.fresh import python

# Megatron's wrapper of full iterations captures over a stand-in for the driver's calls.
SCRIPT = """
import contextlib
import torch
import pipefill_patches

pipefill_patches.apply(("cpu_backend", "training_loop"))
from megatron.core import full_cuda_graph
from megatron.fill.hooks import bus
from megatron.fill.types import CycleKey

class Seen:
    watching = True
    def __init__(self):
        self.facts = []
    def __getattr__(self, name):
        return lambda *args: self.facts.append(name if name != "disturbed" else args[0])

class Graph:
    def register_generator_state(self, state):
        pass
    def capture_begin(self, *args, **kwargs):
        bus.listener.facts.append("capture begins")
    def capture_end(self):
        bus.listener.facts.append("capture ends")
    def replay(self):
        bus.listener.facts.append("replay")

torch.cuda.CUDAGraph = Graph
torch.cuda.empty_cache = torch._C._host_emptyCache = lambda: None
torch.distributed.barrier = lambda: None
full_cuda_graph.get_all_rng_states = dict
full_cuda_graph.get_shared_capture_stream = torch.cuda.Stream
full_cuda_graph.get_graph_pool = lambda single: None
torch.cuda.graphs._get_pool_id = lambda pool: None

def run(wrapper):
    wrapper(model=[None], data_iterator=None, num_microbatches=1, seq_length=1, forward_only=False)

bus.listener = seen = Seen()
wrapper = full_cuda_graph.FullCudaGraphWrapper(lambda **_: bus.listener.facts.append("pass"), 1)
for _ in range(3):
    run(wrapper)
print(seen.facts)

seen.facts.clear()
broken = torch.cuda.graph(Graph(), stream=torch.cuda.Stream())
with contextlib.suppress(ZeroDivisionError), broken:
    1 / 0
print(seen.facts)

seen.facts.clear()
pipefill_patches.PATCHES["training_loop"].revert()
with torch.cuda.graph(Graph(), stream=torch.cuda.Stream()):
    pass
print(seen.facts)
"""


def test_every_capture_of_a_graph_is_a_disturbance():
    done = python("-c", SCRIPT, megatron=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-3:] == [
        "['pass', 'capture begins', 'pass', 'capture ends', 'graph capture', 'replay', 'replay']",
        "['capture begins', 'capture ends', 'graph capture']",
        "['capture begins', 'capture ends']",
    ]


TIMERS = """
import time
import pipefill_patches

pipefill_patches.apply(("cpu_backend", "training_loop"))
from megatron.core.timers import Timers
from megatron.training import global_vars
from pipefill_patches.training_loop import _timers

for level in (2, 0):
    global_vars._GLOBAL_TIMERS = timers = Timers(level, "max")
    for _ in range(2):
        for name, its in (("save-checkpoint", 0), ("forward-backward", 1), ("forward-compute", 2)):
            timers(name, log_level=its).start()
            time.sleep(0.01)
            timers(name, log_level=its).stop()
            if its <= level:
                timers(name).elapsed()  # as its printing does, which begins anew
    print({name: time_s >= 0.02 for name, time_s in _timers().items()})
"""


def test_megatrons_timers_are_read_over_all_of_the_run():
    done = python("-c", TIMERS, megatron=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-2:] == [
        "{'save-checkpoint': True, 'forward-backward': True, 'forward-compute': True}",
        "{}",
    ]


STEPS = """
import megatron.training.training as training

seen = []
def train_step(forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config, forward_backward_func,
               iteration=None):
    seen.append("step")
training.train_step = train_step

import pipefill_patches
pipefill_patches.apply(("cpu_backend", "training_loop"))
from megatron.fill.attached import attached

def step():
    training.train_step(*[None] * 7, iteration=4)

step()
attached.spans = seen.append
step()
attached.spans = lambda iteration: 1 / 0
step()
print(seen, attached.spans)
"""


LOADER = """
import pipefill_patches

pipefill_patches.apply(("cpu_backend", "training_loop"))
from megatron.fill.hooks import bus
from torch.utils.data import DataLoader

batches = iter(DataLoader(list(range(4)), num_workers=1))
next(batches)
bus.account.settle()
del batches
print({name for name, spent in bus.account.snapshot().items() if spent.count} & {"data loading"})
"""


def test_the_end_of_a_loader_is_data_loading():
    done = python("-c", LOADER, megatron=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "{'data loading'}"


OF_OPTIMIZERS = """
import pipefill_patches

pipefill_patches.apply(("cpu_backend", "training_loop"))
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.fill.hooks import bus

class Nothing:
    def zero_grad(self, set_to_none=True):
        print("zero_grad in", sorted(bus.account.snapshot()))

    def step(self):
        print("step in", sorted(bus.account.snapshot()))

its = object.__new__(ChainedOptimizer)
its.chained_optimizers = [Nothing()]
bus.account.begin(0)
ChainedOptimizer.zero_grad(its)
try:
    ChainedOptimizer.step(its)
except Exception:
    print("step in", sorted(bus.account.snapshot()))
"""


def test_zeroing_gradients_is_no_step_of_the_optimizer():
    """Whoever looks for the first step would find one before the first pass, and no wait for another stage with it."""
    done = python("-c", OF_OPTIMIZERS, megatron=True, PIPEFILL_CPU_BACKEND="1")
    assert done.returncode == 0, done.stderr
    zeroing, step = (line for line in done.stdout.splitlines() if " in [" in line)
    assert "'gradients'" in zeroing
    assert "'optimizer'" not in zeroing
    assert "'optimizer'" in step


def test_who_looks_for_spans_is_called_as_an_iteration_begins_and_an_error_there_harms_nobody():
    done = python("-c", STEPS, megatron=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "['step', 5, 'step', 'step'] None"


FINALIZING = """
from argparse import Namespace
from megatron.training import global_vars, training

training.maybe_finalize_async_save = lambda blocking=False, terminate=False: blocking

import pipefill_patches
pipefill_patches.apply(("cpu_backend", "training_loop"))
from megatron.fill.hooks import bus

for saves in (False, True):
    global_vars._GLOBAL_ARGS = Namespace(async_save=saves)
    print(training.maybe_finalize_async_save(blocking=True, terminate=True), "save" in bus.account.snapshot())
"""


def test_the_end_of_saves_in_the_background_is_a_save_where_there_are_such_saves():
    done = python("-c", FINALIZING, megatron=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-2:] == ["True False", "True True"]

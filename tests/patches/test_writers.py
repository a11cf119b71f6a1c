"""The figures of filling beside Megatron's own, on the rank that has the writers."""

from __future__ import annotations

from tests.patches.fresh import python

SCRIPT = """
import types
import megatron.training.training as training

calls = []
def training_log(loss_dict, total_loss_dict, learning_rate, iteration, loss_scale=1.0):
    calls.append(iteration)
    return "as before"
training.training_log = training_log

import pipefill_patches
pipefill_patches.apply(("cpu_backend", "training_loop"))
import megatron.training
import megatron.training.global_vars as variables
from megatron.fill.attached import attached

class Writer:
    def __init__(self):
        self.said = []
    def add_scalar(self, *what):
        self.said.append(what)
    def log(self, *what):
        self.said.append(what)

megatron.training.get_args = lambda: types.SimpleNamespace(log_interval=10)
board, wandb = Writer(), Writer()
variables.get_tensorboard_writer, variables.get_wandb_writer = lambda: board, lambda: wandb

def log(iteration):
    assert training.training_log({}, {}, 0.1, iteration, loss_scale=2.0) == "as before"

log(10)  # PipeFill does not run
attached.figures = lambda: {}
log(20)  # nothing is known yet
attached.figures = lambda: {"bubble_share": 0.25, "jobs_done": 3.0}
log(29)
assert training.training_log({}, {}, 0.1, iteration=30) == "as before"
print(board.said, wandb.said)

board = wandb = None
attached.figures = lambda: 1 / 0
log(40)  # a rank without writers does not even ask
print(attached.figures is not None)
board = Writer()
log(50)
print(attached.figures, board.said, calls)
"""


def test_each_log_interval_gets_the_figures_and_their_failure_harms_nothing():
    done = python("-c", SCRIPT, megatron=True)
    assert done.returncode == 0, done.stderr[-3000:]
    said = [line for line in done.stdout.splitlines() if line.startswith(("[(", "True", "None"))]
    assert said == [
        "[('fill/bubble-share', 0.25, 30), ('fill/jobs-done', 3.0, 30)] "
        "[({'fill/bubble-share': 0.25, 'fill/jobs-done': 3.0}, 30)]",
        "True",
        "None [] [10, 20, 29, 30, 40, 50]",
    ]
    assert "the figures of filling cannot be written any more" in done.stdout + done.stderr

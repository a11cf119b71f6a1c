"""What one GPU of a training holds, found without a GPU: Megatron's own iteration under torch's fake tensors.

Megatron builds model, buffers and optimizer of one rank as ``pretrain_gpt.py`` has it do, and runs its own
``train_step`` with its own schedule.  Tensors are fake (shapes without memory), and so are the process groups: a
collective or a transfer returns at once.  A tracker counts the storages.

What stays out: what the allocator wastes, kernels' workspaces, NCCL's buffers, the CUDA context, and the optimizer's
step, whose temporaries depend on which Adam is installed.  Functions that Megatron compiles on a GPU count with what
they return and keep.  Experts get as many tokens each.

    python tests/support/memory_truth.py --gpus 8 --rank 0 --detailed -- MEGATRON'S FLAGS

prints what is held at the peak.  ``truths`` asks for many ranks, each in a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.support.memory_tracker import StorageTracker

PYTHON = [sys.executable]
# Nothing is run again, or the tracker would count the batches that are kept for it, which real runs have on the host.
_RUN = (
    "--fake-process-group --mock-data --tokenizer-type NullTokenizer --lr 1e-4 --lr-decay-style constant "
    "--train-iters 10 --eval-iters 0 --no-check-for-nan-in-loss-and-grad --rerun-mode disabled"
)


@dataclass(frozen=True, slots=True)
class Asked:
    """One rank of a training; ``flags`` are Megatron's."""

    flags: tuple[str, ...]
    rank: int
    gpus: int


@dataclass(frozen=True, slots=True)
class Truth:
    """What the rank holds.

    Attributes:
        states_bytes: between iterations: weights, gradients, optimizer.
        peak_bytes: the most in an iteration, until its last gradient is there.
        parameters: that the rank holds.
    """

    states_bytes: int
    peak_bytes: int
    parameters: int


class _Prepared:
    """Megatron, imported so that it runs under fake tensors.  It changes this process for good."""

    def __init__(self) -> None:
        warnings.filterwarnings("ignore")
        os.environ.setdefault("LOCAL_RANK", str(os.getpid()))  # which core
        import torch
        import torch._dynamo  # reads torch as it is

        self.tracker: StorageTracker | None = None
        torch.compile = self._fused  # before Megatron names it
        from pipefill_patches.cpu_backend import PATCH

        with contextlib.redirect_stdout(io.StringIO()):
            PATCH.apply()
        import megatron.core.tokenizers.text  # noqa: F401 -- slow, and needed by each process that is forked
        from megatron.training import training

        import pretrain_gpt
        from tests.support.memory_tracker import stand_in

        self.script: Any = pretrain_gpt
        self.training: Any = training
        logging.disable(logging.WARNING)
        stand_in()

    def _fused(self, function: Any = None, **_options: Any) -> Any:
        """In the place of ``torch.compile``."""
        if function is None:
            return self._fused

        def run(*args: Any, **kwargs: Any) -> Any:
            return (self.tracker.fused(function) if self.tracker else function)(*args, **kwargs)

        return run


def _batches(its: Any) -> Iterator[dict[str, Any]]:
    """Micro-batches as the data loader gives them."""
    import torch

    shape = its.micro_batch_size, its.seq_length
    while True:
        batch = {name: torch.empty(shape, dtype=torch.int64) for name in ("tokens", "labels", "position_ids")}
        batch["loss_mask"] = torch.empty(shape)
        if its.create_attention_mask_in_dataloader:
            batch["attention_mask"] = torch.empty(shape[0], 1, shape[1], shape[1], dtype=torch.bool)
        yield batch


def _tell_shapes(its: Any) -> None:
    """Answer what ranks ask each other where the layers that predict later tokens are not on the last one.

    Those send all their outputs in one tensor.  Neither virtual stages nor layouts with parentheses are supported.
    """
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    layout = (its.pipeline_model_parallel_layout or "").split("|")
    at = next((stage for stage, text in enumerate(layout) if "m" in text), len(layout))
    split = its.context_parallel_size * (its.tensor_model_parallel_size if its.sequence_parallel else 1)

    def shape(stage: int) -> tuple[int, int, int]:
        outputs = 1 + (its.mtp_num_layers or 0) * (stage >= at)
        return outputs * its.seq_length // split, its.micro_batch_size, its.hidden_size

    def told(self: Any, _next: Any, _prev: Any, recv_prev: bool, recv_next: bool) -> tuple[Any, Any]:
        stage = self.pp_group.rank()
        return shape(stage - 1) if recv_prev else None, shape(stage) if recv_next else None

    P2PCommunicator._communicate_shapes = told


def _iterate(prepared: _Prepared, asked: Asked, detailed: bool) -> tuple[Truth, StorageTracker]:
    """Build the rank, step its optimizer so that there is a state, and run one iteration."""
    sys.argv = ["pretrain_gpt.py", *asked.flags, *_RUN.split()]
    os.environ |= {"RANK": str(asked.rank), "WORLD_SIZE": str(asked.gpus)}
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.rerun_state_machine import RerunDataIterator
    from megatron.core.utils import get_model_config
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args
    from megatron.training.initialize import initialize_megatron
    from torch._subclasses.fake_tensor import FakeTensorMode

    from tests.support.memory_tracker import StorageTracker, routed

    its = parse_and_validate_args(args_defaults={})
    _tell_shapes(its)
    container = pretrain_cfg_container_from_args(its, gpt_config_from_args(its))
    initialize_megatron(get_embedding_ranks=prepared.script.get_embedding_ranks)
    tracker = StorageTracker(routed, detailed)
    with FakeTensorMode(), tracker:
        prepared.tracker = tracker
        model, optimizer, scheduler = prepared.training.setup_model_and_optimizer(
            ModelType.encoder_or_decoder,
            checkpointing_context={},
            cfg_container=container,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
        for chunk in model:
            chunk.train()
        optimizer.step()
        tracker.restart()
        states_bytes = tracker.now_bytes
        passes_bytes = _before_step(optimizer, tracker)
        config = get_model_config(model[0])
        config.grad_scale_func, config.timers = optimizer.scale_loss, None
        config.finalize_model_grads_func = finalize_model_grads
        data = [RerunDataIterator(_batches(its)) for _ in model]
        prepared.training.train_step(
            *(prepared.script.forward_step, data if len(data) > 1 else data[0], model, optimizer, scheduler, config),
            get_forward_backward_func(),
            iteration=0,
        )
        parameters = sum(one.numel() for chunk in model for one in chunk.parameters())
    return Truth(states_bytes, passes_bytes[0], parameters), tracker


def _before_step(optimizer: Any, tracker: StorageTracker) -> list[int]:
    """Where the peak will be that was reached when the optimizer's step begins."""
    found: list[int] = []
    step = optimizer.step

    def run() -> Any:
        found.append(tracker.peak_bytes)
        tracker.detailed = False
        return step()

    optimizer.step = run
    return found


def _answer(prepared: _Prepared, asked: Asked) -> dict[str, Any]:
    """The truth of one rank, by a process that is forked for it; or what went wrong."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                answer = asdict(_iterate(prepared, asked, False)[0])
        except BaseException as error:  # the parent says it
            answer = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"error": "its process was killed"}


def truths(asked: Sequence[Asked]) -> Iterator[Truth]:
    """The truth of each rank, in order, as it is found.

    Raises:
        RuntimeError: Megatron does not run one of them; says which, and its error.
    """
    for one in answers(asked):
        if isinstance(one, RuntimeError):
            raise one
        yield one


def answers(asked: Sequence[Asked]) -> Iterator[Truth | RuntimeError]:
    """The truth of each rank, or what went wrong with it, in order, as it is found."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump([asdict(one) for one in asked], file)
        file.flush()
        command = [*PYTHON, __file__, "--asked", file.name]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            assert process.stdout is not None
            try:
                for one in asked:
                    line = process.stdout.readline()
                    found = json.loads(line) if line else {"error": "the process that finds truths ended"}
                    if "error" in found:
                        yield RuntimeError(f"rank {one.rank} of {' '.join(one.flags)}: {found['error']}")
                    else:
                        yield Truth(**found)
            finally:
                process.kill()  # the caller may not want the rest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1, help="of the training")
    parser.add_argument("--rank", type=int, default=0, help="which one's memory")
    parser.add_argument("--detailed", action="store_true", help="print what is held at the peak")
    parser.add_argument("--asked", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="Megatron's flags")
    options = parser.parse_args()
    prepared = _Prepared()
    if options.asked:
        for one in json.loads(options.asked.read_text(encoding="utf-8")):
            print(json.dumps(_answer(prepared, Asked(tuple(one["flags"]), one["rank"], one["gpus"]))), flush=True)
        return
    with contextlib.redirect_stdout(io.StringIO()):
        found, tracker = _iterate(prepared, Asked(tuple(options.flags), options.rank, options.gpus), options.detailed)
    print(json.dumps(asdict(found)))
    for name, size in tracker.at_peak.most_common(80):
        print(f"{size / 2**20:12.3f} MiB  {name}")


if __name__ == "__main__":
    main()

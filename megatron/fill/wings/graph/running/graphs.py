"""Training of a graph plan with Megatron: one rank per stage, with the operators of that stage.

A training script makes a ``GraphRun`` before anything starts, and passes its methods to Megatron's ``pretrain``.  The
script defines the operators, by an implementation of ``Operators``.

To Megatron the stages are a pipeline of as many stages, so its optimizer, gradient norm, checkpoints and logs work as
usual.  Only the ranks that a stage receives from and sends to differ.
"""

from __future__ import annotations

import zlib
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from megatron.core import mpu
from megatron.core.distributed import finalize_model_grads
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.pipeline_parallel.multimodule_communicator import MultiModulePipelineCommunicator
from megatron.core.process_groups_config import MultiModuleProcessGroupCollection, ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megatron.core.transformer import MegatronModule

import pipefill_patches
from megatron.fill.errors import GraphError
from megatron.fill.hooks import bus
from megatron.fill.wings.graph.model import ModelGraph
from megatron.fill.wings.graph.plan import Plan
from megatron.fill.wings.graph.runnable import Runnable
from megatron.fill.wings.graph.running.ahead import Ahead, Frozen, turns
from megatron.fill.wings.graph.timeline import simulate
from pipefill_patches import cpu_backend, multimodule

__all__ = ["GraphRun", "Operators"]

Batch = Mapping[str, torch.Tensor]


class Operators(Protocol):
    """The operators of a training script."""

    def inputs(self, name: str) -> tuple[str, ...] | None:
        """Return the operators whose output this one takes, in its order; None if there is no such operator.

        ``name`` comes from the plan, in which a tower may have any number of layers.
        """

    def build(self, name: str, config: Any) -> torch.nn.Module:
        """Build the operator's module, which is called with a list of its inputs and a microbatch.

        The module returns a tensor of shape [sequence, batch, hidden].  The operator whose output no other one takes
        returns the loss instead, a scalar.

        Args:
            config: Megatron's ``TransformerConfig``.
        """

    def shape(self, name: str, args: Namespace) -> tuple[int, int, int]:
        """Return the shape of the operator's output, [sequence, batch, hidden]."""


class _Stage(MegatronModule):
    """The operators of one stage.

    Its output is the one tensor that other stages take, or, if they take several operators' outputs, those packed into
    one tensor.
    """

    def __init__(self, run: GraphRun, number: int, config: Any, groups: Any) -> None:
        super().__init__(config)
        self.pg_collection = groups
        self._run, self._number = run, number
        graph = run.plan.graph
        mine = graph.names(run.plan.masks[number])
        self.operators = torch.nn.ModuleDict()
        for name in mine:
            self.operators[_key(name)] = run.build(name, config)
        self._order = [(name, run.inputs[name]) for name in mine]
        self._taken: Mapping[str, torch.Tensor] = {}

    def train(self, mode: bool = True) -> _Stage:
        """Set the mode as in any module; frozen operators stay in evaluation mode, as those that run ahead do."""
        super().train(mode)
        for name, _ in self._order:
            if self._run.plan.graph.by_name[name].frozen:
                self.operators[_key(name)].eval()
        return self

    def set_input_tensor(self, tensors: Sequence[Any]) -> None:
        """Take the tensors from other stages, a dictionary by stage."""
        self._taken = tensors[0] or {}

    def forward(self, batch: Batch) -> torch.Tensor:
        ahead = self._run.ahead
        values: dict[str, torch.Tensor] = {} if ahead is None else ahead.outputs(batch, self.training)
        for stage, tensor in self._taken.items():
            values |= self._run.unpacked(int(stage), tensor)
        for name, inputs in self._order:
            values[name] = self.operators[_key(name)]([values[source] for source in inputs], batch)
        if not self._run.plan.successors[self._number]:
            return values[self._order[-1][0]]
        found = self._run.packed(self._number, values)
        # Megatron frees a tensor once it is sent, which it cannot do with a view of another tensor.
        return found if found._base is None else found.clone()


class GraphRun:
    """A training of a plan; GraphError if it is of another model, or cannot be trained on this number of ranks."""

    def __init__(self, plan: Plan, operators: Operators, ranks: int) -> None:
        self.plan = plan
        self.operators = operators
        self.inputs = {name: _inputs(plan, operators, name) for name in plan.graph.by_name}
        self.ahead: Ahead | None = None
        sinks = [its.name for its, outputs in zip(plan.graph.operators, plan.graph.outputs, strict=True) if not outputs]
        if len(sinks) > 1:
            raise GraphError(
                f"{plan.graph.name} has the ends {', '.join(sinks[:5])}; expected one, which makes the loss"
            )
        self.runnable = Runnable(plan, ranks)
        self.args = Namespace()

    def apply(self, args: Namespace) -> None:
        """Set Megatron's arguments that the plan determines, after they are parsed and before they are checked.

        GraphError if a flag contradicts the plan.
        """
        stages = len(self.plan.stages)
        decided = {  # the plan's value, and the flag's default
            "pipeline_model_parallel_size": (stages, 1),
            "micro_batch_size": (self.runnable.micro_batch, None),
            "global_batch_size": (self.plan.batch, None),
        }
        for name, (value, default) in decided.items():
            given = getattr(args, name)
            if given not in (default, value):
                raise GraphError(f"--{_flag(name)} is {given}; the plan has {value}: expected that, or no flag")
            setattr(args, name, value)
        for name in ("tensor_model_parallel_size", "context_parallel_size", "expert_model_parallel_size"):
            if getattr(args, name) != 1:
                raise GraphError(f"--{_flag(name)} is {getattr(args, name)}; expected 1: a stage has one rank")
        self._refuse(args, ("step_batch_size_schedule",), "the plan says what the batch is")
        if self.plan.graph.ahead:
            self._apply_ahead(args)
        args.variable_seq_lengths = True  # required by Megatron for several modules
        self.args = args

    def _apply_ahead(self, args: Namespace) -> None:
        """Check and set the flags for operators that run ahead: all ranks must read the same batches in order."""
        if not cpu_backend.PATCH.applied:
            raise GraphError(
                "the plan has operators that run ahead, which works on the CPU alone so far; expected a plan made"
                " without --ahead, or --fill-cpu-backend"
            )
        skipping = ("iterations_to_skip", "result_rejected_tracker_filename", "phase_transition_iterations")
        why = "operators that run ahead take the data ahead"
        self._refuse(args, skipping, why)
        if args.rerun_mode == "report_stats":
            raise GraphError(f"--rerun-mode is report_stats; expected disabled: {why}")
        args.rerun_mode = "disabled"  # a rerun iteration would get the next one's data

    @staticmethod
    def _refuse(args: Namespace, names: Sequence[str], why: str) -> None:
        for name in names:
            if getattr(args, name, None):
                raise GraphError(f"--{_flag(name)} is given; expected none: {why}")

    def model_provider(self, pre_process: bool, post_process: bool, config: Any = None, **_: Any) -> MegatronModule:
        """Build this rank's stage and the communicator; a collective, so all ranks call it."""
        from megatron.training.arguments import core_transformer_config_from_args

        pipefill_patches.apply(("bridge", "multimodule"))
        config = config or core_transformer_config_from_args(self.args)
        config.variable_seq_lengths = True
        config.finalize_model_grads_func = _finalize
        groups = ProcessGroupCollection.use_mpu_process_groups()
        multimodule.use(**self._pipeline(config, groups))
        if self.plan.graph.ahead:
            self.ahead = self._ahead(config)
            bus.callbacks.append(self.ahead)
        return _Stage(self, mpu.get_pipeline_model_parallel_rank(), config, groups)

    def build(self, name: str, config: Any) -> torch.nn.Module:
        """Build an operator's module; its initial weights depend on its name and the seed, not on its stage."""
        with _seeded(self.args.seed + zlib.crc32(name.encode())):
            module = self.operators.build(name, config)
        return module.requires_grad_(not self.plan.graph.by_name[name].frozen)

    def forward_step(self, data_iterator: Iterator[Batch], model: Any) -> tuple[Any, Callable[..., Any] | None]:
        number = mpu.get_pipeline_model_parallel_rank()
        taken = next(data_iterator) if self.ahead is None else self.ahead.next_batch(data_iterator, model.training)
        output = model({name: tensor.cuda(non_blocking=True) for name, tensor in taken.items()})
        if self.plan.successors[number]:
            return {str(number): output}, None
        return output, _loss

    def report(self) -> None:
        """Print the share of the frozen operators' passes that ran in bubbles; called at the end."""
        if self.ahead is not None:
            print(self.ahead, flush=True)

    def packed(self, stage: int, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the tensor that a stage sends: its output, or its outputs packed into one tensor."""
        found = [values[name] for name in self.runnable.outputs[stage]]
        return found[0] if len(found) == 1 else torch.cat([one.reshape(1, 1, -1) for one in found], dim=-1)

    def unpacked(self, stage: int, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the outputs of a stage by operator, from the tensor that it sent."""
        names = self.runnable.outputs[stage]
        if len(names) == 1:
            return {names[0]: tensor}
        shapes = [self.operators.shape(name, self.args) for name in names]
        parts = tensor.reshape(-1).split([length * batch * width for length, batch, width in shapes])
        return {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}

    def _ahead(self, config: Any) -> Ahead:
        args, plan = self.args, self.plan
        order = ModelGraph(plan.graph.name, plan.graph.ahead)
        names = order.names(order.everything)
        # They are not part of the model, so neither the optimizer nor checkpoints include them.
        modules = {name: self.build(name, config).to(config.params_dtype).eval() for name in names}
        return Ahead(
            [
                Frozen(name, modules[name], self.inputs[name], self.operators.shape(name, args), config.params_dtype)
                for name in names
            ],
            self.runnable.ahead,
            turns([sum(wait.duration_ns for wait in waits) for waits in simulate(plan).waits]),
            mpu.get_pipeline_model_parallel_rank(),
            torch.distributed.new_group(),
            self.runnable.microbatches,
            lambda: (args.train_iters - args.iteration) * self.runnable.microbatches,
            slack=self.runnable.received_ahead,
        )

    def _pipeline(self, config: Any, groups: ProcessGroupCollection) -> dict[str, Any]:
        mine = str(mpu.get_pipeline_model_parallel_rank())
        grids, topology = {}, {}
        for number, successors in enumerate(self.plan.successors):
            grids[str(number)] = HyperCommGrid([1, 1, 1, 1], ["tp", "cp", "pp", "dp"], rank_offset=number)
            grids[str(number)].create_pg("pp")
            topology[str(number)] = [str(to) for to in successors]
        axes: Any = {"s": 0, "b": 1, "h": 2}
        communicator = MultiModulePipelineCommunicator(grids, topology, config, dim_mapping=axes)
        sink = None if topology[mine] else mine
        collection = MultiModuleProcessGroupCollection({mine: groups}, sink)
        return {"p2p_communicator": communicator, "pg_collection": collection}


def _inputs(plan: Plan, operators: Operators, name: str) -> tuple[str, ...]:
    """Return the inputs of one operator, in the script's order.

    Raises:
        GraphError: the script has no such operator, or has it with other inputs.
    """
    expected, given = operators.inputs(name), plan.graph.by_name[name].inputs
    if expected is None:
        raise GraphError(f"the plan is of another model: {plan.graph.name} has {name}, and this script has none")
    if set(expected) != set(given):
        has, wants = (", ".join(sorted(some)) or "nothing" for some in (given, expected))
        raise GraphError(f"the plan is of another model: {name} takes {has} there; expected {wants}")
    return expected


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Make weights created in this block depend on the seed alone, and not on the stage."""
    tracker = get_cuda_rng_tracker()
    states = tracker.get_states()
    with torch.random.fork_rng():
        model_parallel_cuda_manual_seed(seed)
        torch.manual_seed(seed)
        yield
    tracker.set_states(states)


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _key(name: str) -> str:
    """Return the operator's name as a module's name, which must not have dots."""
    return name.replace(".", "_")


def _loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return output, {"lm loss": output.detach().clone().view(1)}


def _finalize(model: Any, num_tokens: Any = None, pg_collection: Any = None, force_all_reduce: bool = False) -> None:
    """Call Megatron's function with default process groups: it cannot take those of several modules."""
    finalize_model_grads(model, num_tokens, None, force_all_reduce)

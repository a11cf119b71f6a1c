"""Runs a training script and writes what the rank really trains, so that a flag without effect is seen.

    python tests/parallelism/probe.py FOLDER SCRIPT ARGUMENTS...

``FOLDER/facts-RANK.json`` is written when the script ends: sizes of the process groups, the model's chunks and layers,
configurations as Megatron uses them, what its optimizer is, how often some of its functions were called, and the passes
of each iteration.  The hooks only count: they leave tensors and the order of operations as they are.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import runpy
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

# The functions whose calls are counted, by the name of the count.
COUNTED = {
    "recomputed": "megatron.core.tensor_parallel.random:CheckpointFunction.backward",
    "gradients_ready": "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.register_grad_ready",
    "parameters_waited": "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.finish_param_sync",
    "parameters_sent": "megatron.core.distributed:DistributedDataParallel.start_param_sync",
    "alltoall": "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher.token_dispatch",
    "allgather": "megatron.core.transformer.moe.token_dispatcher:MoEAllGatherTokenDispatcher.token_dispatch",
    "layers_overlapped": "megatron.core.models.common.model_chunk_schedule_plan:TransformerLayerSchedulePlan.run",
    "parameter_norms": "megatron.training.training:calc_params_l2_norm",
    "cache_emptied": "torch.cuda:empty_cache",
}
DDP = (
    "overlap_grad_reduce",
    "overlap_param_gather",
    "use_distributed_optimizer",
    "num_distributed_optimizer_instances",
)
CONFIG = (
    *("sequence_parallel", "recompute_granularity", "recompute_method", "recompute_num_layers", "normalization"),
    *("gated_linear_unit", "add_bias_linear", "num_query_groups", "num_attention_heads", "num_moe_experts"),
    *("moe_router_topk", "moe_token_dispatcher_type", "calculate_per_token_loss", "defer_embedding_wgrad_compute"),
    *("overlap_p2p_comm_warmup_flush", "microbatch_group_size_per_vp_stage", "overlap_moe_expert_parallel_comm"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "mtp_num_layers"),
)
ORDERED = 2  # the iteration whose order of passes is kept


class Probe:
    """What is seen of one rank's training.

    Attributes:
        forwards: passes forward of the first chunk in each iteration of training.
        evaluated: passes forward of the first chunk in evaluations, by the iterations trained before them.
        order: passes of the second iteration: ``F0`` is one forward of the first chunk, ``B0`` one backward.
    """

    def __init__(self) -> None:
        self.calls = Counter(dict.fromkeys(COUNTED, 0))
        self.forwards: list[int] = []
        self.evaluated: Counter[int] = Counter()
        self.order: list[str] = []
        self.layer_input: list[int] = []
        self.facts: dict[str, Any] = {}
        self._forward = 0

    def install(self) -> None:
        """Watch what Megatron's set-up returns."""
        training = importlib.import_module("megatron.training.training")
        original = training.setup_model_and_optimizer

        @functools.wraps(original)
        def setup(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            self._watch(*found[:2])
            return found

        vars(training)["setup_model_and_optimizer"] = setup

    def _watch(self, chunks: list[Any], optimizer: Any) -> None:
        from megatron.core.utils import unwrap_model

        for name, place in COUNTED.items():
            self._count(name, place)
        models = unwrap_model(chunks)
        for number, model in enumerate(models):
            model.register_forward_pre_hook(functools.partial(self._passes, number))
            layers = model.decoder.layers
            if layers:
                layers[0].register_forward_pre_hook(self._entered, with_kwargs=True)
                parameter = next(part for part in layers[0].parameters() if part.requires_grad)
                parameter.register_hook(functools.partial(self._returns, number))
        step = optimizer.step

        @functools.wraps(step)
        def stepped(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            self.forwards.append(self._forward)
            self._forward = 0
            if not self.facts:
                self.facts = facts(chunks, models, optimizer) | {"zeros_counted": result[2] is not None}
            return result

        optimizer.step = stepped

    def _count(self, name: str, place: str) -> None:
        module, _, path = place.partition(":")
        owner: Any = importlib.import_module(module)
        *outer, last = path.split(".")
        for part in outer:
            owner = getattr(owner, part)
        original = vars(owner)[last]
        static = isinstance(original, staticmethod)
        function = original.__func__ if static else original

        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return function(*args, **kwargs)

        setattr(owner, last, staticmethod(counted) if static else counted)

    def _passes(self, chunk: int, model: Any, _: Any) -> None:
        if not chunk and model.training:
            self._forward += 1
        elif not chunk:
            self.evaluated[len(self.forwards)] += 1
        if model.training and len(self.forwards) == ORDERED - 1:
            self.order.append(f"F{chunk}")

    def _returns(self, chunk: int, _: Any) -> None:
        if len(self.forwards) == ORDERED - 1:
            self.order.append(f"B{chunk}")

    def _entered(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.layer_input = list((args[0] if args else kwargs["hidden_states"]).shape)

    def write(self, path: Path) -> None:
        """Leave what was seen in a file; nothing of a training that never stepped."""
        if not self.facts:
            return
        seen = {
            "calls": self.calls,
            "forwards": self.forwards,
            "batch_changes": sum(one != two for one, two in zip(self.forwards, self.forwards[1:], strict=False)),
            "evaluated": self.evaluated,
            "order": " ".join(self.order),
            "layer_input": self.layer_input,
        }
        path.write_text(json.dumps(self.facts | seen), encoding="utf-8")


def facts(chunks: list[Any], models: list[Any], optimizer: Any) -> dict[str, Any]:
    """The sizes and configurations that Megatron trains with, after its first step."""
    import torch.distributed
    from megatron.core import parallel_state as groups
    from megatron.training import get_args

    config = models[0].config
    pipeline = torch.distributed.get_process_group_ranks(groups.get_pipeline_model_parallel_group())
    instances = groups.get_inter_distributed_optimizer_instance_group(check_initialized=False)
    return {
        "groups": {
            "tensor": groups.get_tensor_model_parallel_world_size(),
            "pipeline": groups.get_pipeline_model_parallel_world_size(),
            "data": groups.get_data_parallel_world_size(),
            "context": groups.get_context_parallel_world_size(),
            "experts": groups.get_expert_model_parallel_world_size(),
            "optimizer_instances": instances.size() if instances is not None else 1,
        },
        "pipeline_stride": pipeline[1] - pipeline[0],
        "stage": groups.get_pipeline_model_parallel_rank(),
        "layers": [len(model.decoder.layers) for model in models],
        "optimizers": sorted({type(part).__name__ for part in getattr(optimizer, "chained_optimizers", [optimizer])}),
        "gather_with_step": optimizer.config.overlap_param_gather_with_optimizer_step,
        "loss_scale": float(optimizer.get_loss_scale()),
        "ddp": {name: getattr(chunks[0].ddp_config, name) for name in DDP},
        "reduced_for_all_stages_at_once": config.grad_sync_func is not None,
        "config": {name: getattr(config, name, None) for name in CONFIG},
        "activation": config.activation_func.__name__,
        "tied_embeddings": models[0].share_embeddings_and_output_weights,
        "dtypes": sorted({str(part.dtype) for model in models for part in model.parameters()}),
        "modules": sorted({type(part).__name__ for model in models for part in model.modules()}),
        "position_embedding": models[0].position_embedding_type,
        "query_rows": query_rows(models),
        "microbatches": microbatches(),
        "evaluation_iterations": get_args().eval_iters,
    }


def query_rows(models: list[Any]) -> int:
    """The rows of the first layer's weight for queries, keys and values; 0 on a rank without layers."""
    for model in models:
        for name, part in model.named_parameters():
            if name.endswith("linear_qkv.weight"):
                return part.shape[0]
    return 0


def microbatches() -> int:
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    return get_num_microbatches()


def main() -> None:
    folder, script = Path(sys.argv[1]), sys.argv[2]
    sys.path[0] = str(ROOT)
    import megatron.fill.device.before_cuda  # noqa: F401 -- Megatron asks for CUDA while it is imported

    probe = Probe()
    probe.install()
    sys.argv = sys.argv[2:]
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        probe.write(folder / f"facts-{os.environ['RANK']}.json")


if __name__ == "__main__":
    main()

"""Pretrain a GPT model with Megatron, and fill its pipeline bubbles with the jobs of ``--fill-jobs``.

The flags are Megatron's own.  For the features left out here (supervised fine-tuning, fill-in-the-middle, packed
sequences, ModelOpt, distillation), ``python -m pipefill_patches`` runs NVIDIA's ``pretrain_gpt.py`` unchanged.  This
script follows NVIDIA's: see NOTICE.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import megatron.fill.device.before_cuda  # noqa: F401 -- Megatron asks for CUDA while it is imported

# isort: split
import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.utils import (
    StragglerDetector,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_timers, pretrain, print_rank_0
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from megatron.fill.errors import PatchError

BATCH_KEYS = ("tokens", "position_ids", "attention_mask", "labels", "loss_mask")
SPIKY_LOSS_FACTOR = 10
UNSUPPORTED = (
    *("sft", "fim_data", "dataloader_inter_document_masking", "hybrid_context_parallel"),
    *("logits_load_dir", "inprocess_restart"),
)

Batch = dict[str, torch.Tensor | None]
straggler_timer = StragglerDetector()


def _predicts_more_tokens(vp_stage: int | None) -> bool:
    """True if this stage has a multi-token-prediction layer, which needs the data too."""
    args = get_args()
    if args.mtp_num_layers is None:
        return False
    layout = core_transformer_config_from_args(args).pipeline_model_parallel_layout
    return mtp_on_this_rank(layout, args.mtp_num_layers, ignore_virtual=False, vp_stage=vp_stage)


def get_batch(data_iterator: Iterator[Batch], vp_stage: int | None = None) -> Batch:
    """Return this rank's part of the next microbatch, by ``BATCH_KEYS``; None for tensors its stage does not use."""
    args = get_args()
    more_tokens = _predicts_more_tokens(vp_stage)
    if not is_first_or_last_pipeline_stage(vp_stage) and not more_tokens:
        return dict.fromkeys(BATCH_KEYS)
    batch: Batch = {}
    tp_rank = mpu.get_tensor_model_parallel_rank()
    if tp_rank == 0:
        loaded = next(data_iterator)
        for key in BATCH_KEYS:
            tensor = loaded.get(key)
            batch[key] = None if tensor is None else tensor.cuda(non_blocking=True)
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=more_tokens,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())
    return {key: batch[key] for key in BATCH_KEYS}


def loss_func(
    loss_mask: torch.Tensor, output: torch.Tensor, model: Any = None
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the summed loss of a microbatch, its number of unmasked tokens, and both as the report "lm loss"."""
    args = get_args()
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    tokens = mask.sum().detach().to(torch.int)

    check = get_rerun_state_machine()
    refused = {"NaN": torch.isnan, "Inf": torch.isinf} if args.check_for_nan_in_loss_and_grad else {}
    for name, is_bad in refused.items():
        message = f"found {name} in local forward loss calculation"
        check.validate_result(result=loss, rejection_func=is_bad, message=message, tolerance=0.0, fatal=True)
    if args.check_for_spiky_loss:
        is_spiky = partial(check.is_unexpectedly_large, threshold=SPIKY_LOSS_FACTOR, context="loss")
        check.validate_result(result=loss, rejection_func=is_spiky, message="Spiky loss", tolerance=0.0, fatal=False)

    return loss, tokens, {"lm loss": torch.stack((loss.detach().clone(), tokens.float()))}


def forward_step(data_iterator: Iterator[Batch], model: Any, return_schedule_plan: bool = False) -> tuple[Any, Any]:
    """Run a microbatch's forward pass on this stage; return its output, and the function that computes its loss."""
    timer = get_timers()("batch-generator", log_level=2)
    timer.start()
    with straggler_timer(bdata=True):
        batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timer.stop()
    loss_mask = batch["loss_mask"]
    with straggler_timer:
        run = model.build_schedule_plan if return_schedule_plan else model
        inputs = (batch["tokens"], batch["position_ids"], batch["attention_mask"])
        output = run(*inputs, labels=batch["labels"], loss_mask=loss_mask)
    return output, partial(loss_func, loss_mask, model=model)


def _dataset_config(args: Any) -> GPTDatasetConfig:
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    sequences_per_dataset = None
    if args.per_dataset_sequences_path is not None:
        with open(args.per_dataset_sequences_path, encoding="utf-8") as file:
            sequences_per_dataset = json.load(file)
    same_name = (
        *("split", "multiple_validation_sets", "full_validation", "num_dataset_builder_threads", "mmap_bin_files"),
        *("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "object_storage_cache_path"),
        *("mid_level_dataset_surplus", "allow_ambiguous_pad_tokens", "context_parallel_size", "data_parallel_size"),
    )
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        create_attention_mask=args.create_attention_mask_in_dataloader,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        sequences_per_dataset=sequences_per_dataset,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
        **{name: getattr(args, name) for name in same_name},
    )


def datasets_provider(sizes: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Return the training, validation and test datasets of the given sizes in samples, on the ranks that read data."""

    def reads_data() -> bool:
        wanted = is_first_or_last_pipeline_stage(vp_stage) or _predicts_more_tokens(vp_stage)
        return mpu.get_tensor_model_parallel_rank() == 0 and wanted

    args = get_args()
    print_rank_0("> building train, validation, and test datasets for GPT ...")
    dataset = MockGPTDataset if args.mock_data else GPTDataset
    datasets = BlendedMegatronDatasetBuilder(dataset, sizes, reads_data, _dataset_config(args)).build()
    print_rank_0("> finished creating GPT datasets ...")
    return tuple(datasets)


datasets_provider.is_distributed = True  # type: ignore[attr-defined]  # Megatron reads it: every rank calls this


def get_embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """Return a pipeline's ranks with the word embedding: the first, the last if tied, and those with an MTP layer."""
    args = get_args()
    ranks = {pp_ranks[0]}
    if len(pp_ranks) > 1:
        if not args.untie_embeddings_and_output_weights:
            ranks.add(pp_ranks[-1])
        ranks.update(get_mtp_ranks(pp_ranks, core_transformer_config_from_args(args)))
    return sorted(ranks)


def main() -> None:
    """Train with the flags of the command line.

    Raises:
        ValueError: a flag is supported by NVIDIA's own script only.
        PatchError: this megatron-core is not 0.19, and builds models in another way.
    """
    try:
        from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
        from megatron.training.arguments import parse_and_validate_args
    except ImportError as error:
        raise PatchError(
            f"this script is written for megatron-core 0.19: {error}; expected that, or the script of the version that "
            "is installed, run with `python -m pipefill_patches`"
        ) from error
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    for name in UNSUPPORTED:
        if getattr(args, name, None):
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} is not supported here; run NVIDIA's script with `python -m pipefill_patches`")
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    model_type = ModelType.encoder_or_decoder
    pretrain(config, datasets_provider, model_type, forward_step, get_embedding_ranks=get_embedding_ranks)


if __name__ == "__main__":
    from megatron.fill.app.launch import launch

    launch(main)

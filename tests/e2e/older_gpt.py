"""``pretrain_gpt.py`` for megatron-core 0.18, which is handed a function that builds the model, and not a config of it.

For ``scripts/test.sh --megatron``: with that version the trainings of these tests run this script.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.utils import get_batch_on_this_tp_rank
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import core_transformer_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import pretrain_gpt


def get_batch(batch: Any, has_cu_seqlens: bool, **kwargs: Any) -> Any:
    return get_batch_on_this_tp_rank(batch, is_sft=has_cu_seqlens, **kwargs)


def build(pre_process: bool = True, post_process: bool = True, config: Any = None, **kwargs: Any) -> GPTModel:
    args = get_args()
    return GPTModel(
        config or core_transformer_config_from_args(args),
        get_gpt_layer_local_spec(normalization=args.normalization),
        args.padded_vocab_size,
        args.max_position_embeddings,
        pre_process,
        post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        **kwargs,
    )


def main() -> None:
    config = pretrain_cfg_container_from_args(parse_and_validate_args())
    pretrain(
        config,
        pretrain_gpt.datasets_provider,
        build,
        ModelType.encoder_or_decoder,
        pretrain_gpt.forward_step,
        get_embedding_ranks=pretrain_gpt.get_embedding_ranks,
    )


if __name__ == "__main__":
    from megatron.fill.app import launch

    pretrain_gpt.get_batch_on_this_tp_rank = get_batch
    launch(main)

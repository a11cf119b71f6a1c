"""What can be said of a training's bubbles before one was seen."""

from __future__ import annotations

import logging
from argparse import Namespace

from megatron.fill.types import RankInfo

logger = logging.getLogger("pipefill")

_FEW = 0.02  # of the time


def warn_of_few_bubbles(info: RankInfo, args: Namespace) -> None:
    """Say so where jobs will find none, or next to none: equal stages have bubbles of (p-1)/(v m + p-1) of the time.

    Args:
        args: Megatron's.
    """
    if info.stages == 1:
        logger.warning(
            "there is one pipeline stage and so no bubble: the jobs will not run; "
            "expected --pipeline-model-parallel-size 2 or more"
        )
        return
    microbatches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    passes = microbatches * (args.virtual_pipeline_model_parallel_size or 1)
    share = (info.stages - 1) / (passes + info.stages - 1)
    if share < _FEW:
        logger.warning(
            "with %d stages and %d passes through each, about %.1f%% of the time are bubbles: there is little to fill; "
            "more stages, or fewer micro-batches or virtual stages, make more",
            info.stages,
            passes,
            100 * share,
        )

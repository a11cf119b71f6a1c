"""Warnings about a training before its first iteration."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Sequence

from megatron.fill.types import RankInfo

logger = logging.getLogger("pipefill")

_FEW = 0.02  # share of the time in bubbles below which a warning is given


def warn_of_few_bubbles(info: RankInfo, args: Namespace) -> None:
    """Warn if there are few bubbles or none: with equal stages they take (p-1)/(v m + p-1) of the time."""
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


def warn_of_no_ramp(ramp: Sequence[int | str], batch_size: int) -> None:
    """Warn if Megatron ignores ``--rampup-batch-size``, as it does since 0.18, and begins with ``batch_size``."""
    if int(ramp[0]) != batch_size:
        logger.warning(
            "--rampup-batch-size %s is ignored by this Megatron: the batch size begins with %d, not %s; "
            "expected --step-batch-size-schedule",
            " ".join(map(str, ramp)),
            batch_size,
            ramp[0],
        )

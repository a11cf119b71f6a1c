"""Language models as fill jobs: batches of requests, and token trees (SpecInfer, arXiv 2305.09781)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.fill.lazy import lazily

if TYPE_CHECKING:
    from megatron.fill.wings.llm.batch import BatchJob
    from megatron.fill.wings.llm.evaluate import EvaluateCheckpoints
    from megatron.fill.wings.llm.tuning import DraftTuning
else:  # the verifiers need nothing of them
    __getattr__ = lazily(__name__, {"batch": "BatchJob", "evaluate": "EvaluateCheckpoints", "tuning": "DraftTuning"})

__all__ = ["BatchJob", "DraftTuning", "EvaluateCheckpoints"]

"""Language models as fill jobs: batches of requests, and token trees (SpecInfer, arXiv 2305.09781)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.fill.wings.llm.batch import BatchJob
    from megatron.fill.wings.llm.evaluate import EvaluateCheckpoints
    from megatron.fill.wings.llm.tuning import DraftTuning

__all__ = ["BatchJob", "DraftTuning", "EvaluateCheckpoints"]


def __getattr__(name: str) -> Any:
    """The jobs, imported when they are asked for: the verifiers need nothing of them."""
    if name == "BatchJob":
        from megatron.fill.wings.llm.batch import BatchJob

        return BatchJob
    if name == "EvaluateCheckpoints":
        from megatron.fill.wings.llm.evaluate import EvaluateCheckpoints

        return EvaluateCheckpoints
    if name == "DraftTuning":
        from megatron.fill.wings.llm.tuning import DraftTuning

        return DraftTuning
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

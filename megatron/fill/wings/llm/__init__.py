"""Language models as fill jobs: batches of requests, and token trees (SpecInfer, arXiv 2305.09781)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.fill.wings.llm.batch import BatchJob
    from megatron.fill.wings.llm.evaluate import EvaluateCheckpoints
    from megatron.fill.wings.llm.tuning import DraftTuning

__all__ = ["BatchJob", "DraftTuning", "EvaluateCheckpoints"]
_MODULES = {"BatchJob": "batch", "DraftTuning": "tuning", "EvaluateCheckpoints": "evaluate"}


def __getattr__(name: str) -> Any:
    """The jobs, imported when they are asked for: the verifiers need nothing of them."""
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

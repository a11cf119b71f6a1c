"""The paper's workloads (PipeFill, table 1): built from configurations with random weights, nothing is downloaded.

=================  ================================================  ===================
name               what ``size: full`` is                            parameters
=================  ================================================  ===================
efficientnet       timm's ``efficientnetv2_l`` (or ``variant``)      118.5 million
bert-base          BERT, 12 layers of 768                            109.5 million
bert-large         BERT, 24 layers of 1024                           335.1 million
swin-large         timm's ``swin_large_patch4_window7_224``          196.5 million
xlm-roberta-xl     XLM-RoBERTa, 36 layers of 2560                    3.48 billion
=================  ================================================  ===================

All of them classify: images into 1,000 classes, texts into two.  ``size: tiny`` is the same architecture with a few
narrow layers, for tests and for trying things out.  Any field of the configuration can be given besides
(``hidden_size``, ``depths``, ``variant``, ...).
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from megatron.fill.errors import TaskError

_BERT = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
_BERT_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_XLM_XL = {
    "vocab_size": 250_880,
    "max_position_embeddings": 514,
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "intermediate_size": 10_240,
}
_TINY_TEXT = {
    "vocab_size": 500,
    "max_position_embeddings": 66,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
_SWIN = {"variant": "swin_large_patch4_window7_224", "num_classes": 1000}
_TINY_SWIN = {
    "img_size": 32,
    "window_size": 4,
    "embed_dim": 16,
    "depths": (2, 2),
    "num_heads": (2, 4),
    "num_classes": 10,
}
_EFFICIENTNET = {"variant": "efficientnetv2_l", "num_classes": 1000}
_TINY_EFFICIENTNET = {"variant": "test_efficientnet", "num_classes": 10}


@dataclass(frozen=True, slots=True)
class Workload:
    """One of the paper's fill jobs.

    Attributes:
        kind: ``bert``, ``xlm-roberta-xl`` or ``timm``.
        full, tiny: the fields of its configuration in the two sizes; ``tiny`` overrides ``full``.
        length: of its inputs in the two sizes: tokens of a text, or pixels along a side of an image.
    """

    kind: str
    full: dict[str, Any]
    tiny: dict[str, Any]
    length: tuple[int, int]

    def fields(self, size: str, overrides: dict[str, Any]) -> dict[str, Any]:
        if size not in ("full", "tiny"):
            raise ValueError(f"size is {size!r}: expected 'full' or 'tiny'")
        return self.full | (self.tiny if size == "tiny" else {}) | overrides


WORKLOADS: dict[str, Workload] = {
    "efficientnet": Workload("timm", _EFFICIENTNET, _TINY_EFFICIENTNET, (384, 32)),
    "bert-base": Workload("bert", _BERT, _TINY_TEXT, (128, 16)),
    "bert-large": Workload("bert", _BERT_LARGE, _TINY_TEXT, (128, 16)),
    "swin-large": Workload("timm", _SWIN, _TINY_SWIN, (224, 32)),
    "xlm-roberta-xl": Workload("xlm-roberta-xl", _XLM_XL, _TINY_TEXT, (128, 16)),
}


def find_workload(name: str) -> Workload:
    """Raises ValueError when there is none of that name."""
    if name not in WORKLOADS:
        known = ", ".join(WORKLOADS)
        raise ValueError(f"model is {name!r}: expected module:factory or one of {known}")
    return WORKLOADS[name]


def build_model(name: str, size: str = "full", **overrides: Any) -> Any:
    """A workload's model, a ``torch.nn.Module`` with random weights of torch's present generator.

    Args:
        size: ``full`` or ``tiny``.
        overrides: fields of the ``transformers`` configuration, or arguments of ``timm.create_model``.

    Raises:
        ValueError: an unknown name, size or field.
        TaskError: transformers or timm is not installed.
    """
    workload = find_workload(name)
    fields = workload.fields(size, overrides)
    if workload.kind == "timm":
        timm = need("timm")
        variant = fields.pop("variant")
        try:
            return timm.create_model(variant, pretrained=False, **fields)
        except (TypeError, RuntimeError) as error:  # an unknown argument; an unknown variant
            raise ValueError(f"model_args of {name}: {error}") from error
    transformers = need("transformers")
    config_class, model_class = {
        "bert": (transformers.BertConfig, transformers.BertForSequenceClassification),
        "xlm-roberta-xl": (transformers.XLMRobertaXLConfig, transformers.XLMRobertaXLForSequenceClassification),
    }[workload.kind]
    unknown = set(fields) - set(config_class().to_dict())
    if unknown:
        raise ValueError(f"model_args of {name}: unknown {', '.join(sorted(unknown))}: expected fields of BertConfig")
    return model_class(config_class(**fields))


def need(module: str) -> Any:
    """Import a package of the extra ``models``.

    Raises:
        TaskError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise TaskError(f"{module} is missing ({error}); install it with: pip install 'pipefill[models]'") from error

"""The models that come with PipeFill (``megatron.fill.models``), built with random weights: nothing is downloaded.

All are classifiers: images into 1,000 classes, texts into two.  ``size: tiny`` is the same architecture with a few
narrow layers, for tests and experiments.  In addition, any field of the configuration can be set (``hidden_size``,
``depths``, ``variant``, ...).
"""

from __future__ import annotations

import importlib
from typing import Any

from megatron.fill.errors import TaskError
from megatron.fill.models import MODELS, Model

_TINY_TEXT = {
    "vocab_size": 500,
    "max_position_embeddings": 66,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
_TINY_SWIN = {"img_size": 32, "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4)}
_TINY: dict[str, dict[str, Any]] = {  # fields that override the full size
    "efficientnet-b4": {"variant": "test_efficientnet"},
    "efficientnet-v2-l": {"variant": "test_efficientnet"},
    "swin-large": _TINY_SWIN,
    "resnet18": {"variant": "test_resnet"},
    "resnet50": {"variant": "test_resnet"},
    "vgg19": {"variant": "vgg11", "mlp_ratio": 0.01},
}


def find_workload(name: str) -> Model:
    """The model with this name; ValueError if there is none."""
    if name not in MODELS:
        known = ", ".join(MODELS)
        raise ValueError(f"model is {name!r}: expected module:factory or one of {known}")
    return MODELS[name]


def input_length(model: Model, size: str) -> int:
    """The length of a model's inputs: tokens of a text, or pixels along a side of an image."""
    return model.length if size == "full" else 16 if model.is_text else 32


def model_fields(model: Model, size: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """The fields of a model's configuration in this size, with overrides; ValueError if there is no such size."""
    if size not in ("full", "tiny"):
        raise ValueError(f"size is {size!r}: expected 'full' or 'tiny'")
    shape = model.shape
    if shape is None:
        full: dict[str, Any] = {"variant": model.variant, "num_classes": 1000}
        tiny = {"num_classes": 10} | _TINY[model.name]
    else:
        full = {
            "vocab_size": shape.vocabulary,
            "max_position_embeddings": shape.positions,
            "hidden_size": shape.hidden,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "intermediate_size": 4 * shape.hidden,
        }
        tiny = _TINY_TEXT
    return full | (tiny if size == "tiny" else {}) | overrides


def build_model(name: str, size: str = "full", **overrides: Any) -> Any:
    """Build a model of ``MODELS``, a ``torch.nn.Module`` with random weights from torch's default generator.

    Args:
        overrides: fields of the ``transformers`` configuration, or arguments of ``timm.create_model``.

    Raises:
        ValueError: the name, the size or a field is unknown.
        TaskError: transformers or timm is not installed.
    """
    model = find_workload(name)
    fields = model_fields(model, size, overrides)
    if not model.is_text:
        timm = need("timm")
        variant = fields.pop("variant")
        try:
            return timm.create_model(variant, pretrained=False, **fields)
        except (TypeError, RuntimeError) as error:  # an unknown argument; an unknown variant
            raise ValueError(f"model_args of {name}: {error}") from error
    transformers = need("transformers")
    family = "XLMRobertaXL" if name == "xlm-roberta-xl" else "Bert"
    config_class = getattr(transformers, f"{family}Config")
    model_class = getattr(transformers, f"{family}ForSequenceClassification")
    unknown = set(fields) - set(config_class().to_dict())
    if unknown:
        raise ValueError(f"model_args of {name}: unknown {', '.join(sorted(unknown))}: expected fields of BertConfig")
    return model_class(config_class(**fields))


def need(module: str) -> Any:
    """Import a package of the extra ``models``; TaskError if the package is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise TaskError(f"{module} is missing ({error}); install it with: pip install 'pipefill[models]'") from error

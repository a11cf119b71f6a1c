"""The models that come with PipeFill (``megatron.fill.models``), built with random weights: nothing is downloaded.

All are classifiers: images into 1,000 classes, texts into two.  ``size: tiny`` is the same architecture with a few
narrow layers, for tests and experiments.  In addition, any field of the configuration can be set (``hidden_size``,
``depths``, ``variant``, ...).
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
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
_TINY_LENGTH = {"timm": 32, "text": 16}  # pixels along a side, or tokens


@dataclass(frozen=True, slots=True)
class Workload:
    """A model of ``megatron.fill.models``, with the fields to build it."""

    model: Model

    @property
    def is_text(self) -> bool:
        return self.model.shape is not None

    def length(self, size: str) -> int:
        """The length of its inputs: tokens of a text, or pixels along a side of an image."""
        return _TINY_LENGTH["text" if self.is_text else "timm"] if size == "tiny" else self.model.length

    def fields(self, size: str, overrides: dict[str, Any]) -> dict[str, Any]:
        """The fields of the model's configuration in this size, with overrides.

        Raises:
            ValueError: there is no such size.
        """
        if size not in ("full", "tiny"):
            raise ValueError(f"size is {size!r}: expected 'full' or 'tiny'")
        shape = self.model.shape
        if shape is None:
            full: dict[str, Any] = {"variant": self.model.variant, "num_classes": 1000}
            tiny = {"num_classes": 10} | _TINY[self.model.name]
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


WORKLOADS: dict[str, Workload] = {name: Workload(model) for name, model in MODELS.items()}


def find_workload(name: str) -> Workload:
    """The workload with this name.

    Raises:
        ValueError: there is none.
    """
    if name not in WORKLOADS:
        known = ", ".join(WORKLOADS)
        raise ValueError(f"model is {name!r}: expected module:factory or one of {known}")
    return WORKLOADS[name]


def build_model(name: str, size: str = "full", **overrides: Any) -> Any:
    """Build a workload's model, a ``torch.nn.Module`` with random weights from torch's default generator.

    Args:
        name: name of the workload.
        size: ``full`` or ``tiny``.
        overrides: fields of the ``transformers`` configuration, or arguments of ``timm.create_model``.

    Raises:
        ValueError: the name, the size or a field is unknown.
        TaskError: transformers or timm is not installed.
    """
    workload = find_workload(name)
    fields = workload.fields(size, overrides)
    if not workload.is_text:
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
    """Import a package of the extra ``models``.

    Raises:
        TaskError: the package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise TaskError(f"{module} is missing ({error}); install it with: pip install 'pipefill[models]'") from error

"""The models that come with PipeFill, run by jobs (``sidetask.models``) and described in the simulator.

``parameters`` are those of the runtime's model, with its head for 1,000 classes of images or two of texts; a test
counts them, and compares the simulator's blocks with them.

``efficientnet-v2-l`` to ``xlm-roberta-xl`` are PipeFill's fill jobs (arXiv 2410.07192, table 1), ``resnet18``,
``resnet50`` and ``vgg19`` FreeRide's (arXiv 2409.06941, section 6).  ``efficientnet-b4`` is there for its published
throughputs, to which the simulator's constants are fitted.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Encoder:
    """A Transformer encoder for texts, whose MLP is four times as wide as its hidden size."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    positions: int


@dataclass(frozen=True, slots=True)
class Model:
    """A model."""

    name: str
    parameters: int
    length: int  # length of a sample: tokens of a text, or pixels along a side of an image
    shape: Encoder | None = None  # shape of a text's encoder; None for a model of ``timm``
    variant: str = ""  # its name in ``timm``; empty for an encoder, which is one of ``transformers``

    @property
    def is_text(self) -> bool:
        return self.shape is not None


_TABLE = (
    Model("efficientnet-b4", 19_341_616, 380, variant="efficientnet_b4"),  # Tan and Le 2019
    Model("efficientnet-v2-l", 118_515_272, 384, variant="efficientnetv2_l"),  # Tan and Le 2021
    Model("bert-base", 109_483_778, 128, Encoder(12, 768, 12, 30_522, 512)),  # Devlin et al. 2018
    Model("bert-large", 335_143_938, 128, Encoder(24, 1024, 16, 30_522, 512)),  # Devlin et al. 2018
    Model("swin-large", 196_532_476, 224, variant="swin_large_patch4_window7_224"),  # Liu et al. 2021
    Model("xlm-roberta-xl", 3_482_490_882, 128, Encoder(36, 2560, 32, 250_880, 514)),  # Goyal et al. 2021
    Model("resnet18", 11_689_512, 224, variant="resnet18"),  # He et al. 2015
    Model("resnet50", 25_557_032, 224, variant="resnet50"),  # He et al. 2015
    Model("vgg19", 143_667_240, 224, variant="vgg19"),  # Simonyan and Zisserman 2014
)
MODELS: dict[str, Model] = {model.name: model for model in _TABLE}

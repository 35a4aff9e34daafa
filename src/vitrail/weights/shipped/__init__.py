"""Models that come with the package: small, and there without a network.

vitrail/cifar10 is a ViT of 4.0 M parameters for images of 32 x 32 pixels, taught by a larger one:
`vitrail train cifar10`, then `vitrail train cifar10-small`. It is stored in float16, which changed none
of its 10,000 decisions on CIFAR-10's test images (bfloat16 changed 4): 97.39 % of them are right (95 %
interval 97.06 to 97.68; float32 arithmetic on a CPU). Photographs are another matter, since they must be
made as small: of 213 of ImageNet's that show one of its classes it names 159 rightly. Cropped in the
middle, that is, as it does; squashed into a square, 155, and CIFAR-10's own images are the same in both.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from vitrail.weights.model_info import ModelInfo


@dataclass(frozen=True)
class ShippedModel:
    """One model in the package."""

    name: str
    description: str
    """What it is and has shown, in a few words."""
    family: str = "ViT"
    aliases: tuple[str, ...] = ()
    weights_url: str = ""

    @property
    def hub_id(self) -> str:
        """What `vitrail.load(name)` stands for; like a published model, of which it has all fields."""
        return self.name

    @property
    def path(self) -> Path:
        """The folder of its files."""
        return Path(__file__).parent / self.name.rpartition("/")[2]

    @property
    def info(self) -> ModelInfo:
        """Network, preprocessing and class names; its weights are not read."""
        return ModelInfo.from_dict(json.loads((self.path / "config.json").read_text(encoding="utf-8")))


DEFAULT_MODEL = ShippedModel(
    "vitrail/cifar10", "a small ViT for images of 32 x 32 pixels, right on 97.4 % of CIFAR-10's test images"
)
"""What commands use that are given no model."""

SHIPPED = {model.name: model for model in (DEFAULT_MODEL,)}

"""Models that ship with the package: small, and available offline.

vitrail/cifar10 is a ViT with 4.0 M parameters for 32 x 32 images, distilled from a larger one: `vitrail train cifar10`,
then `vitrail train cifar10-small`. Top-1 accuracy on CIFAR-10's 10,000 test images: 97.39 % (95 % interval 97.06 to
97.68; float32 arithmetic on a CPU). It is stored in float16, which changes none of these predictions (bfloat16 changes
4). Photographs are harder, since they are reduced to 32 x 32: of 213 ImageNet photographs that show one of its classes,
159 are classified correctly with a center crop, as in its preprocessing, and 155 if squashed into a square. For
CIFAR-10's own images the two are the same.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from vitrail.models.published_models import PublishedModel
from vitrail.weights.model_info import ModelInfo


@dataclass(frozen=True)
class ShippedModel(PublishedModel):
    """A model that ships with the package."""

    description: str = ""
    """A short description with its measured accuracy."""

    @property
    def family(self) -> str:
        return "ViT"

    @property
    def path(self) -> Path:
        """The model folder."""
        return Path(__file__).parent / self.name.rpartition("/")[2]

    @property
    def info(self) -> ModelInfo:
        """Config, preprocessing and class names; the weights are not read."""
        return ModelInfo.from_dict(json.loads((self.path / "config.json").read_text(encoding="utf-8")))


DEFAULT_MODEL = ShippedModel(
    "vitrail/cifar10",
    "vitrail/cifar10",
    description="a small ViT for images of 32 x 32 pixels, top-1 accuracy 97.4 % on CIFAR-10's test images",
)
"""Used by commands without `--model`."""

SHIPPED = {model.name: model for model in (DEFAULT_MODEL,)}

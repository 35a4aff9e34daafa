"""Recipes: functions that return the settings of a training run.

Each docstring states the measured accuracy and cost, or that the recipe has not been run.
"""

from __future__ import annotations

from collections.abc import Callable

from vitrail.config import TrainConfig
from vitrail.recipes.cifar10 import cifar10, cifar10_small, cifar100
from vitrail.recipes.digits import digits
from vitrail.recipes.imagenet import deit_s16, imagenet1k_s16, imagenet21k_b16, masked_patch
from vitrail.recipes.mnist import fashion_mnist, mnist

RECIPES: dict[str, Callable[[], TrainConfig]] = {
    "digits": digits,
    "mnist": mnist,
    "fashion-mnist": fashion_mnist,
    "cifar10": cifar10,
    "cifar10-small": cifar10_small,
    "cifar100": cifar100,
    "imagenet1k-s16": imagenet1k_s16,
    "imagenet21k-b16": imagenet21k_b16,
    "deit-s16": deit_s16,
    "masked-patch": masked_patch,
}
"""Recipes of `vitrail train NAME`. Fine-tuning has its own command, `vitrail finetune`."""

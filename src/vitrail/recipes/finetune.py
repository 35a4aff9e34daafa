"""Fine-tuning recipes: default settings for a folder of photographs, and the settings of the ViT paper.

ViT-Ti/16, 205 photographs of 3 classes, two CPU cores: first loss after 4 s, 20 steps and the report after 12 s
(`vitrail finetune ... duration='20 steps'`), all of the 22 held-out images classified correctly.
Run: vitrail finetune --model MODEL --data photos/
     vitrail finetune --model MODEL --data photos/ --recipe paper
"""

from __future__ import annotations

import math

from vitrail.config import (
    AugmentConfig,
    ClassifyConfig,
    DataConfig,
    Duration,
    NetConfig,
    OptimConfig,
    ScheduleConfig,
    TrainConfig,
    ViTConfig,
    epochs,
    pair,
    steps,
)

PAPER_IMAGE_SIZE, SMALL_IMAGE_SIZE = 384, 128
"""Pixels: the paper's image size for fine-tuning; below SMALL_IMAGE_SIZE, a model is one for small images."""


def finetune(init_from: str, source: str, *, num_images: int, device: str = "cpu") -> TrainConfig:
    """AdamW with layer-wise decay, at the checkpoint's own resolution.

    Duration and batch size depend on the number of images: a small data set gets small batches and
    many epochs, so that training takes at least a few hundred steps; a large one gets fewer epochs.
    """
    batch = _power_of_two(max(num_images / 16, min(8, num_images)), 64 if device == "cpu" else 256)
    duration = epochs(_clamp(1500 * batch / num_images / 4, 5, 50))
    return TrainConfig(
        name="finetune",
        init_from=init_from,
        data=DataConfig(source=source),
        augment=AugmentConfig(scale=(0.25, 1.0), interpolation="bicubic", flip=0.5, color_jitter=(0.2, 0.2, 0.2, 0.0)),
        classify=ClassifyConfig(label_smoothing=0.1),
        optim=OptimConfig(lr=5e-4, weight_decay=0.05, layer_decay=0.75),
        schedule=ScheduleConfig(kind="cosine", warmup=Duration(count=duration.count / 10, unit="epochs")),
        duration=duration,
        batch_size=batch,
        log_every=steps(1 if device == "cpu" else 10),
    )


def finetune_paper(init_from: str, source: str, *, num_images: int, device: str = "cpu") -> TrainConfig:
    """The paper's Table 4: SGD with momentum 0.9, cosine schedule, gradient clipping at 1, no weight decay.

    The head is initialized to zero. 500 steps for a few thousand images, 10,000 for CIFAR, 20,000 for
    ImageNet; batch size 512, or less for fewer images. `paper_image_size` gives the resolution. The paper
    chose the best of four learning rates: try optim.lr=0.001, 0.003, 0.01 and 0.03.
    """
    num_steps = 500 if num_images < 20_000 else 10_000 if num_images < 500_000 else 20_000
    return TrainConfig(
        name="finetune-paper",
        init_from=init_from,
        data=DataConfig(source=source),
        augment=AugmentConfig(scale=(0.05, 1.0), flip=0.5),
        optim=OptimConfig(kind="sgd", lr=0.01, momentum=0.9, grad_clip=1.0),
        schedule=ScheduleConfig(kind="cosine", warmup=steps(min(500, num_steps // 5))),
        duration=steps(num_steps),
        batch_size=_power_of_two(num_images, 512),
    )


def paper_image_size(network: NetConfig) -> int:
    """384 px as in the paper, rounded to a multiple of the patch size; below `SMALL_IMAGE_SIZE`, twice the size."""
    side = max(pair(network.image_size))
    if side < SMALL_IMAGE_SIZE:
        return 2 * side
    if not isinstance(network, ViTConfig):
        return PAPER_IMAGE_SIZE
    step = math.lcm(*pair(network.patch_size)) * (network.stem.stride if network.stem is not None else 1)
    return round(PAPER_IMAGE_SIZE / step) * step


def train_only(config: TrainConfig, trainable: str | int) -> TrainConfig:
    """Restrict training to the head, or to the head and the last `trainable` blocks.

    The head alone is a linear classifier: it needs a higher learning rate and no layer-wise decay.
    """
    optim = config.optim.replace(trainable=trainable)
    if trainable == "head" and optim.kind == "adamw":
        optim = optim.replace(lr=5e-3, layer_decay=None)
    return config.replace(optim=optim.to_dict())


def _power_of_two(value: float, high: int) -> int:
    """The largest power of two that is at most `value` and at most `high`; at least 1."""
    size = 1
    while size * 2 <= min(value, high):
        size *= 2
    return size


def _clamp(value: float, low: int, high: int) -> int:
    return round(min(max(value, low), high))


FINETUNE_RECIPES = {"finetune": finetune, "paper": finetune_paper}
"""Recipes of `vitrail finetune --recipe NAME`."""

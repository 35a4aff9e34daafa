"""ImageNet from scratch: big_vision's plain ViT-S/16, the paper's B/16 on ImageNet-21k, DeiT-S, masked patches.

None of these recipes has been run by this project: they need days on many GPUs. Each docstring states the
accuracy that the authors report.
"""

from __future__ import annotations

from typing import Any

from vitrail.config import (
    AugmentConfig,
    ClassifyConfig,
    DataConfig,
    OptimConfig,
    PreprocessConfig,
    ScheduleConfig,
    TrainConfig,
    epochs,
    steps,
)
from vitrail.config.image import IMAGENET_MEAN, IMAGENET_STD
from vitrail.config.sizes import SIZES, vit_config

SHARDS = "shards:imagenet1k-train-{0000..1023}.tar"
SHARDS_21K = "shards:imagenet21k-train-{0000..2047}.tar"
LARGE: dict[str, Any] = {"compile": True, "log_every": steps(50), "evaluate_every": epochs(5)}
"""Settings of every recipe for a large dataset."""


def imagenet1k_s16() -> TrainConfig:
    """big_vision's baseline: 76.5 % in 90 epochs, 80.0 % in 300 (reported by the authors; not run here).

    Global average pooling, a tanh layer before the head, fixed sin-cos position embeddings, mixup 0.2, no
    dropout; the weight decay of 1e-4 is decoupled from the learning rate. Two differences from big_vision:
    RandAugment 2/10 is timm's (some operations differ, each is applied with probability 0.5), and mixup draws
    a ratio for each image.
    """
    return TrainConfig(
        name="imagenet1k-s16",
        model=vit_config(
            "S/16", num_classes=0, class_token=False, pool="gap", pre_logits=SIZES["S"].width, position="sincos-2d"
        ),
        preprocess=PreprocessConfig(resize="short", resize_to=256, interpolation="area", crop_rounding="floor"),
        data=DataConfig(source=SHARDS, held_out=0.01),
        augment=AugmentConfig(scale=(0.05, 1.0), policy="rand", num_ops=2, magnitude=10, mixup=0.2),
        optim=OptimConfig(lr=1e-3, weight_decay=1e-4, decay_by="schedule"),
        schedule=ScheduleConfig(kind="cosine", warmup=steps(10_000)),
        duration=epochs(90),
        batch_size=1024,
        **LARGE,
    )


def imagenet21k_b16() -> TrainConfig:
    """The paper's pre-training of B/16 on ImageNet-21k (Table 3): 83.97 % on ImageNet after fine-tuning
    (reported by the authors; not run here).

    Sigmoid cross-entropy, one binary classifier per class. The paper uses Adam with L2 decay of 0.03; this
    recipe uses AdamW.
    """
    return TrainConfig(
        name="imagenet21k-b16",
        model=vit_config("B/16", num_classes=0, dropout=0.1, pre_logits=SIZES["B"].width, head_bias_init=-10.0),
        preprocess=PreprocessConfig(antialias=False),
        data=DataConfig(source=SHARDS_21K, held_out=0.001),
        augment=AugmentConfig(scale=(0.05, 1.0)),
        classify=ClassifyConfig(loss="sigmoid"),
        optim=OptimConfig(lr=1e-3, weight_decay=0.03),
        schedule=ScheduleConfig(kind="linear", warmup=steps(10_000)),
        duration=epochs(90),
        batch_size=4096,
        **LARGE,
    )


def deit_s16() -> TrainConfig:
    """DeiT-S: 79.9 % in 300 epochs (reported by the authors; not run here).

    For the distilled model (81.2 %), add `objective=distill distill.teacher=... model.distilled=true`.
    """
    return TrainConfig(
        name="deit-s16",
        model=vit_config("S/16", num_classes=0, activation="gelu", resample="huggingface", drop_path=0.1),
        preprocess=PreprocessConfig(
            resize="short", resize_to=256, interpolation="bicubic", mean=IMAGENET_MEAN, std=IMAGENET_STD
        ),
        data=DataConfig(source=SHARDS, held_out=0.01, repeats=3),
        augment=AugmentConfig(
            interpolation="bicubic",
            policy="rand",
            num_ops=2,
            magnitude=9,
            magnitude_std=0.5,
            erase=0.25,
            mixup=0.8,
            cutmix=1.0,
        ),
        classify=ClassifyConfig(label_smoothing=0.1),
        optim=OptimConfig(lr=1e-3, weight_decay=0.05, grad_clip=None),
        schedule=ScheduleConfig(kind="cosine", warmup=epochs(5), min_lr_ratio=0.01),
        duration=epochs(300),
        batch_size=1024,
        ema=0.99996,
        **LARGE,
    )


def masked_patch() -> TrainConfig:
    """The paper's self-supervised B/16 (appendix B.1.2) on JFT or ImageNet: 79.9 % after fine-tuning,
    2 points above training from scratch (reported by the authors; not run here)."""
    return TrainConfig(
        name="masked-patch",
        model=vit_config("B/16", num_classes=0),
        preprocess=PreprocessConfig(resize="short", resize_to=256),
        data=DataConfig(source=SHARDS, held_out=0.01),
        augment=AugmentConfig(scale=(0.05, 1.0)),
        objective="masked-patch",
        optim=OptimConfig(lr=2e-4, weight_decay=0.05),
        schedule=ScheduleConfig(kind="cosine", warmup=steps(10_000)),
        duration=steps(100_000),
        batch_size=4096,
        **LARGE | {"evaluate_every": None},
    )

"""The lecture's ViT on MNIST and Fashion-MNIST: 28 px, patch 4, width 64, 4 heads, 2 layers, 10 epochs.

Not yet run.
Run: vitrail train mnist
     vitrail train mnist model.position=none
     vitrail train fashion-mnist
"""

from __future__ import annotations

from vitrail.config import (
    AugmentConfig,
    DataConfig,
    OptimConfig,
    PreprocessConfig,
    ScheduleConfig,
    TrainConfig,
    ViTConfig,
    epochs,
)


def mnist(source: str = "mnist") -> TrainConfig:
    return TrainConfig(
        name=source,
        model=ViTConfig(
            image=28, patch=4, channels=1, classes=0, width=64, depth=2, heads=4, mlp=256, activation="gelu"
        ),
        preprocess=PreprocessConfig(image=28, mean=(0.5,), std=(0.5,)),
        data=DataConfig(source=source),
        augment=AugmentConfig(crop="none", flip=0.0),
        optim=OptimConfig(kind="muon", lr=3e-3, weight_decay=0.05),
        schedule=ScheduleConfig(kind="cosine", warmup=epochs(1)),
        duration=epochs(10),
        batch=256,
        compare=("model.position=none",),
    )


def fashion_mnist() -> TrainConfig:
    return mnist("fashion-mnist")

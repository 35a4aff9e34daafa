"""Small objectives of every kind, for the tests that apply to all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from compare import randomized
from torch import Tensor

from vitrail import rng
from vitrail.config import PreprocessConfig, SwinConfig, ViTConfig
from vitrail.config.train import ClassifyConfig, DistillConfig, MaskedPatchConfig, SimMIMConfig, TrainConfig
from vitrail.models import Net, build
from vitrail.objectives import (
    DistillObjective,
    LabelLoss,
    MaskedPatchObjective,
    Objective,
    SimMIMObjective,
    Teacher,
    make_objective,
)
from vitrail.weights.model_info import ModelInfo

SMALL = {"image_size": 16, "patch_size": 4, "width": 16, "depth": 2, "num_heads": 2, "mlp_dim": 24, "num_classes": 5}
PREPROCESS = PreprocessConfig(image_size=16, mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3))


def make_net(seed: int = 0, **options: Any) -> Net:
    return randomized(build(ViTConfig(**SMALL | options)), seed).train()


def make_seeds(count: int, step: int = 0) -> Tensor:
    return rng.seeds_to_tensor(rng.sample_seeds(3, step, np.arange(count)))


def make_batch(
    count: int = 6, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random images, class indices, weights of which one is zero, and sample seeds."""
    images = torch.randn(count, options.get("channels", 3), 16, 16, dtype=dtype)
    weights = torch.ones(count)
    weights[count // 2] = 0
    return images, torch.randint(5, (count,)), weights, make_seeds(count)


def make_teacher(net: Net, preprocess: PreprocessConfig = PREPROCESS, **options: Any) -> Teacher:
    return Teacher(
        net, ModelInfo(config=net.config, preprocess=preprocess), PREPROCESS, **{"dtype": torch.float64} | options
    )


def classify(loss: str = "softmax", smoothing: float = 0.1, **options: Any) -> Objective:
    config = TrainConfig(
        model=ViTConfig(**SMALL), classify=ClassifyConfig(loss=loss, label_smoothing=smoothing, **options)
    )
    counts = np.array([1, 2, 0, 4, 5])
    return make_objective(config, make_net(**DROP_RATES), PREPROCESS, class_counts=counts)


def masked_patch(target: str = "mean-color", net: Net | None = None, **options: Any) -> MaskedPatchObjective:
    objective = MaskedPatchObjective(
        net or make_net(**DROP_RATES), MaskedPatchConfig(target=target, **options), PREPROCESS, seed=0
    )
    torch.nn.init.normal_(objective.guess.weight)
    return objective


def make_swin(**options: Any) -> Net:
    """A Swin Transformer for 16 x 16 images: maps of 4 x 4 and 2 x 2 tokens."""
    small = {"image_size": 16, "width": 8, "depths": (2, 2), "num_heads": (1, 2), "window_size": 3, "num_classes": 5}
    return randomized(build(SwinConfig(**small | options))).train()


def simmim(net: Net | None = None, **options: Any) -> SimMIMObjective:
    options = {"mask_patch_size": 8} | options
    return SimMIMObjective(net or make_swin(**DROP_RATES), SimMIMConfig(**options), PREPROCESS, seed=0)


def distill(kind: str = "hard", distilled: bool = True) -> DistillObjective:
    labels = LabelLoss(ClassifyConfig(label_smoothing=0.1), 5)
    net = make_net(distilled=distilled, **DROP_RATES)
    return DistillObjective(net, labels, make_teacher(make_net(1)), DistillConfig(kind=kind, teacher="another"))


DROP_RATES = {"dropout": 0.2, "drop_path": 0.3}
OBJECTIVES = {
    "softmax": classify,
    "sigmoid": lambda: classify("sigmoid"),
    "balanced": lambda: classify(class_weights="balanced"),
    "mean color": masked_patch,
    "downsized": lambda: masked_patch("downsized"),
    "pixels": lambda: masked_patch("pixels"),
    "SimMIM of a Swin": simmim,
    "SimMIM of a ViT": lambda: simmim(make_net(**DROP_RATES), normalize_box=5),
    "hard": distill,
    "soft": lambda: distill("soft"),
    "plain student": lambda: distill("soft", distilled=False),
}


def save_checkpoint(net: Net, path: Path, labels: tuple[str, ...] | None = None, **changes: Any) -> str:
    """Save the network as a checkpoint; returns its path as a string for configs."""
    from vitrail.weights import checkpoint

    info = ModelInfo(config=net.config, preprocess=PREPROCESS.replace(**changes), labels=labels)
    checkpoint.write(net, info, path)
    return str(path)

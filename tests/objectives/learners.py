"""Small learners of every kind, for the tests that all objectives share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from compare import randomized
from torch import Tensor

from vitrail import rng
from vitrail.config import PreprocessConfig, ViTConfig
from vitrail.config.train import ClassifyConfig, DistillConfig, MaskedPatchConfig, TrainConfig
from vitrail.models import Net, build
from vitrail.objectives import DistillObjective, LabelLoss, MaskedPatchObjective, Objective, Teacher, make_objective
from vitrail.weights.model_info import ModelInfo

SMALL = {"image_size": 16, "patch_size": 4, "width": 16, "depth": 2, "num_heads": 2, "mlp_dim": 24, "num_classes": 5}
WAY = PreprocessConfig(image_size=16, mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3))


def net_of(seed: int = 0, **options: Any) -> Net:
    return randomized(build(ViTConfig(**SMALL | options)), seed).train()


def seeds_for(count: int, step: int = 0) -> Tensor:
    return rng.seeds_to_tensor(rng.sample_seeds(3, step, np.arange(count)))


def batch(count: int = 6, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images, class indices, weights with a zero among them, sample_seeds."""
    images = torch.randn(count, options.get("channels", 3), 16, 16, dtype=dtype)
    weights = torch.ones(count)
    weights[count // 2] = 0
    return images, torch.randint(5, (count,)), weights, seeds_for(count)


def teacher_of(net: Net, way: PreprocessConfig = WAY, **options: Any) -> Teacher:
    return Teacher(net, ModelInfo(config=net.config, preprocess=way), WAY, **{"dtype": torch.float64} | options)


def classify(loss: str = "softmax", smoothing: float = 0.1, **options: Any) -> Objective:
    config = TrainConfig(
        model=ViTConfig(**SMALL), classify=ClassifyConfig(loss=loss, label_smoothing=smoothing, **options)
    )
    counts = np.array([1, 2, 0, 4, 5])
    return make_objective(config, net_of(**RATES), WAY, class_counts=counts)


def masked(target: str = "mean-color", net: Net | None = None, **options: Any) -> MaskedPatchObjective:
    found = MaskedPatchObjective(net or net_of(**RATES), MaskedPatchConfig(target=target, **options), WAY, seed=0)
    torch.nn.init.normal_(found.guess.weight)
    return found


def distill(kind: str = "hard", distilled: bool = True) -> DistillObjective:
    labels = LabelLoss(ClassifyConfig(label_smoothing=0.1), 5)
    net = net_of(distilled=distilled, **RATES)
    return DistillObjective(net, labels, teacher_of(net_of(1)), DistillConfig(kind=kind, teacher="another"))


RATES = {"dropout": 0.2, "drop_path": 0.3}
LEARNERS = {
    "softmax": classify,
    "sigmoid": lambda: classify("sigmoid"),
    "balanced": lambda: classify(class_weights="balanced"),
    "mean color": masked,
    "downsized": lambda: masked("downsized"),
    "pixels": lambda: masked("pixels"),
    "hard": distill,
    "soft": lambda: distill("soft"),
    "plain student": lambda: distill("soft", distilled=False),
}


def saved(net: Net, path: Path, labels: tuple[str, ...] | None = None, **changes: Any) -> str:
    """The network as a checkpoint that a config can name."""
    from vitrail.weights import checkpoint

    info = ModelInfo(config=net.config, preprocess=WAY.replace(**changes), labels=labels)
    checkpoint.write(net, info, path)
    return str(path)

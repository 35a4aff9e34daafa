"""Training objectives: classification, masked patch prediction, SimMIM, distillation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch

from vitrail.config import PreprocessConfig
from vitrail.config.train import TrainConfig
from vitrail.errors import ConfigError
from vitrail.models import Net
from vitrail.objectives.base import Objective
from vitrail.objectives.classify import ClassifyObjective, LabelLoss
from vitrail.objectives.custom_objective import LossFunction, make_custom_objective, requires_labels
from vitrail.objectives.distill import DistillObjective, Teacher, load_teacher
from vitrail.objectives.masked_patch import MaskedPatchObjective
from vitrail.objectives.simmim import SimMIMObjective

__all__ = [
    "ClassifyObjective",
    "DistillObjective",
    "LabelLoss",
    "LossFunction",
    "MaskedPatchObjective",
    "Objective",
    "SimMIMObjective",
    "Teacher",
    "make_objective",
    "requires_labels",
]


def make_objective(
    config: TrainConfig,
    net: Net,
    preprocess: PreprocessConfig,
    *,
    multi_label: bool = False,
    class_counts: npt.ArrayLike | None = None,
    labels: Sequence[str] | None = None,
    device: torch.device | str = "cpu",
    custom: Any = None,
) -> Objective:
    """The objective of a config for this model, on this device.

    Train `objective.net`, which may be a copy: self-supervised ones remove the head.
    `multi_label`: an image may have several labels. `class_counts`: number of images of each class, for
    balanced weights. `labels`: class names, to compare with the teacher's. `custom`: the objective itself, if
    it is not one of vitrail's: a function or a subclass of Objective.
    """
    if custom is not None:
        return make_custom_objective(custom, net).to(device)
    if config.objective == "masked-patch":
        return MaskedPatchObjective(net, config.masked_patch, preprocess, config.seed).to(device)
    if config.objective == "simmim":
        return SimMIMObjective(net, config.simmim, preprocess, config.seed).to(device)
    loss = LabelLoss(config.classify, net.config.num_classes, multi_label=multi_label, class_counts=class_counts)
    if config.objective == "classify":
        return ClassifyObjective(net, loss).to(device)
    if multi_label:
        raise ConfigError("distillation needs one label per image, got a multi-label data set; try objective=classify.")
    dtype = torch.float64 if config.precision == "float64" else torch.float32
    teacher = load_teacher(
        config.distill, net.config.num_classes, preprocess, labels=labels, device=device, dtype=dtype
    )
    return DistillObjective(net, loss, teacher, config.distill).to(device)

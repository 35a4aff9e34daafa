"""Output + target -> loss: classify, masked_patch, distill; each is a module around the network."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from vitrail.config import PreprocessConfig, TrainConfig
from vitrail.models import Net
from vitrail.objectives.base import Objective
from vitrail.objectives.classify import Classify

__all__ = ["Classify", "Objective", "make_objective"]


def make_objective(
    config: TrainConfig,
    net: Net,
    preprocess: PreprocessConfig,
    *,
    several: bool = False,
    class_counts: npt.NDArray[np.int64] | None = None,
    device: torch.device | str = "cpu",
) -> Objective:
    """What the settings ask to be learned, around a network."""
    if config.objective == "classify":
        return Classify(net, config.classify, several=several, counts=class_counts)
    raise NotImplementedError(config.objective)

"""The arithmetic of a training step, against what torch counts while it computes one."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vitrail.config import ViTConfig
from vitrail.config.train import ClassifyConfig
from vitrail.models import build
from vitrail.models.flops import count_flops, training_flops
from vitrail.objectives import ClassifyObjective, LabelLoss
from vitrail.train.optimizer import freeze

TINY = ViTConfig(image_size=16, patch_size=4, num_classes=5, width=16, depth=3, num_heads=2, mlp_dim=32)


@pytest.mark.parametrize("train", ["all", "head", 0, 1, 3])
def test_a_training_step_is_counted_as_torch_counts_it(train: str | int):
    learner = ClassifyObjective(build(TINY, 0).train(), LabelLoss(ClassifyConfig(), 5))
    freeze(learner, train)
    images = torch.randn(2, 3, 16, 16)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        learner(images, torch.tensor([1, 2]), torch.ones(2))["loss"].backward()
    expected = training_flops(TINY, train)
    # Nobody needs the gradient of the lowest input: of the images, or of what the lowest block that learns is given.
    assert 0.85 * expected <= counter.get_total_flops() / 2 <= expected
    assert training_flops(TINY, "all") == 3 * count_flops(TINY)

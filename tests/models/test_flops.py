"""FLOPs of a training step, against torch's own counter."""

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
from vitrail.training.optimizer import freeze

TINY = ViTConfig(
    image_size=16, patch_size=4, num_classes=5, width=16, depth=3, num_heads=2, mlp_dim=32, pool="gap"
)  # all tokens of the last block count


@pytest.mark.parametrize("train", ["all", "head", 0, 1, 3])
def test_training_flops_match_torchs_counter(train: str | int):
    objective = ClassifyObjective(build(TINY, 0).train(), LabelLoss(ClassifyConfig(), 5))
    freeze(objective, train)
    images = torch.randn(2, 3, 16, 16)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        objective(images, torch.tensor([1, 2]), torch.ones(2))["loss"].backward()
    expected = training_flops(TINY, train)
    # torch does not compute the gradient of the lowest input: of the images, or of the lowest trainable block's input.
    assert 0.85 * expected <= counter.get_total_flops() / 2 <= expected
    assert training_flops(TINY, "all") == 3 * count_flops(TINY)

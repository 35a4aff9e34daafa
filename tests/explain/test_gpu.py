"""Explanations on a GPU equal those on the CPU."""

from __future__ import annotations

import pytest
import torch
from compare import randomized
from explain.test_attention import CONFIGS, random_images
from small_models import gradient, model

from vitrail.explain import (
    attention_distance,
    attention_maps,
    feature_colors,
    gradient_rollout,
    occlusion,
    patch_features,
    position_similarity,
    rollout_map,
)
from vitrail.models import build

pytestmark = pytest.mark.gpu
TOLERANCE = {"rtol": 2e-3, "atol": 1e-4}


@pytest.mark.parametrize("name", CONFIGS)
def test_explanations_on_gpu_equal_those_on_cpu(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # torch allows TF32 in convolutions by default
    config = CONFIGS[name]
    net = randomized(build(config)).eval()
    images, targets = random_images(config), torch.tensor([1, 3])
    on_cpu = _explanations(net, images, targets)
    on_gpu = _explanations(net.cuda(), images.cuda(), targets.cuda())
    for kind, value in on_cpu.items():
        torch.testing.assert_close(on_gpu[kind].cpu().double(), value.double(), msg=kind, **TOLERANCE)


def _explanations(net, images, targets) -> dict[str, torch.Tensor]:
    views, prefix = attention_maps(net, images)
    return {
        "rollout": rollout_map(net, images),
        "gradient": gradient_rollout(net, images, targets),
        "views": views,
        "prefix": prefix,
        "distance": attention_distance(net, images),
        "occlusion": occlusion(net, images, targets, size=1),
        "positions": torch.from_numpy(position_similarity(net)),
    }


def test_explain_and_feature_colors_run_on_gpu():
    vit = model(CONFIGS["map"])
    vit.to("cuda")
    explanation = vit.explain(gradient(), faithfulness=True)
    assert set(explanation.faithfulness) == {"rollout", "gradient", "attention", "occlusion", "random"}
    images = vit.preprocess(gradient()).cuda()
    assert feature_colors(patch_features(vit.net, images)).shape == (1, 4, 4, 3)

"""Looking inside on a GPU: the same maps as on the CPU."""

from __future__ import annotations

import pytest
import torch
from compare import randomized
from explain.test_attention import KINDS, image
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
CLOSE = {"rtol": 2e-3, "atol": 1e-4}


@pytest.mark.parametrize("name", KINDS)
def test_the_same_maps(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # torch lets convolutions round, unless told
    config = KINDS[name]
    net = randomized(build(config)).eval()
    images, targets = image(config), torch.tensor([1, 3])
    here = _looked(net, images, targets)
    there = _looked(net.cuda(), images.cuda(), targets.cuda())
    for what, value in here.items():
        torch.testing.assert_close(there[what].cpu().double(), value.double(), msg=what, **CLOSE)


def _looked(net, images, targets) -> dict[str, torch.Tensor]:
    views, special = attention_maps(net, images)
    return {
        "rollout": rollout_map(net, images),
        "gradient": gradient_rollout(net, images, targets),
        "views": views,
        "special": special,
        "distance": attention_distance(net, images),
        "occlusion": occlusion(net, images, targets, size=1),
        "positions": torch.from_numpy(position_similarity(net)),
    }


def test_a_whole_look_and_colors():
    vit = model(KINDS["map"])
    vit.to("cuda")
    explanation = vit.explain(gradient(), faithfulness=True)
    assert set(explanation.faithfulness) == {"rollout", "gradient", "attention", "occlusion", "random"}
    images = vit.preprocess(gradient()).cuda()
    assert feature_colors(patch_features(vit.net, images)).shape == (1, 4, 4, 3)

"""A network with the normalization in its patch embedding gives the logits of normalized images."""

from __future__ import annotations

import pytest
import torch
from compare import randomized, relative
from models.test_compile import KINDS, SMALL

from vitrail.config import PreprocessConfig, ViTConfig
from vitrail.data.preprocess import Preprocess
from vitrail.errors import ModelError
from vitrail.models import ViT, build
from vitrail.models.pixel_input import PixelInput

IMAGENET = PreprocessConfig(image_size=32, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


@pytest.mark.parametrize("kind", ["plain", "clip", "rope, registers", "map"])
def test_logits_are_those_of_normalized_images(kind: str) -> None:
    net = randomized(build(KINDS[kind])).double().eval()
    pixels = torch.randint(256, (3, 32, 32, 3), dtype=torch.uint8)
    images = Preprocess(IMAGENET).normalize(pixels.permute(0, 3, 1, 2))
    with torch.no_grad():
        expected, found = net(images.double()), PixelInput(net, IMAGENET)(pixels)
        assert relative(found, expected) <= 1e-6, "the images are normalized in float32"
        assert relative(PixelInput(net.float(), IMAGENET)(pixels), expected) <= 1e-5
        half, plain = net.bfloat16(), net(images.bfloat16())
        assert relative(PixelInput(half, IMAGENET)(pixels), expected) <= 2 * relative(plain, expected) + 1e-3


def test_other_sizes_and_channels_work_and_the_network_is_unchanged() -> None:
    net = randomized(ViT(ViTConfig(**SMALL, channels=1))).eval()
    before = net.patch.weight.clone()
    preprocess = PreprocessConfig(image_size=40, mean=(0.1,), std=(0.3,))
    pixels = torch.randint(256, (2, 40, 24, 1), dtype=torch.uint8)
    images = Preprocess(preprocess).normalize(pixels.permute(0, 3, 1, 2))
    with torch.no_grad():
        assert relative(PixelInput(net, preprocess)(pixels), net(images)) <= 1e-5
    assert torch.equal(net.patch.weight, before)


def test_hybrids_and_wrong_channels_are_refused() -> None:
    with pytest.raises(ModelError, match="hybrid"):
        PixelInput(build(KINDS["hybrid"]), IMAGENET)
    with pytest.raises(ModelError, match="got means of 3 channels, expected 1"):
        PixelInput(ViT(ViTConfig(**SMALL, channels=1)), IMAGENET)

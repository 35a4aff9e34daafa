"""SimMIM compared with slow reference code, for Swin Transformers and ViTs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objectives.small_objectives import PREPROCESS, make_net, make_seeds, make_swin, simmim

from vitrail.config import BiTConfig, SimMIMConfig, SwinConfig, ViTConfig
from vitrail.config.train import TrainConfig
from vitrail.errors import ConfigError, ModelError
from vitrail.models import build
from vitrail.objectives import SimMIMObjective, make_objective
from vitrail.objectives.simmim import normalize_in_boxes

NETWORKS = {"Swin": make_swin, "Swin V2": lambda: make_swin(version=2), "ViT": lambda: make_net(num_registers=1)}


def objective_of(name: str, **options: Any) -> SimMIMObjective:
    return simmim(NETWORKS[name](), **options).double()


@settings(max_examples=20)
@given(st.floats(0.05, 0.95), st.sampled_from([(16, 16), (16, 24), (20, 12)]))
def test_the_ceiling_of_the_ratio_is_masked_in_every_image(ratio: float, size: tuple[int, int]) -> None:
    cells = simmim(mask_ratio=ratio, mask_patch_size=4).masked_cells(torch.zeros(5, 3, *size), make_seeds(5))
    assert cells.shape == (5, size[0] // 4, size[1] // 4)
    assert cells.sum((1, 2)).tolist() == [math.ceil(ratio * cells[0].numel())] * 5


def test_cells_are_masked_equally_often() -> None:
    cells = simmim(mask_ratio=0.5, mask_patch_size=4).masked_cells(torch.zeros(4000, 3, 16, 16), make_seeds(4000))
    assert (cells.float().mean(0) - 0.5).abs().max() < 0.04


@pytest.mark.parametrize("name", NETWORKS)
def test_loss_is_the_mean_absolute_error_of_the_masked_pixels(name: str) -> None:
    objective, images, seeds = objective_of(name), torch.randn(3, 3, 16, 16, dtype=torch.float64), make_seeds(3)
    cells = objective.masked_cells(images, seeds)
    predicted = objective.predict(images, cells, seeds).detach().numpy()
    expected = []
    for image, guess, mask in zip(images.numpy(), predicted, cells.numpy(), strict=True):
        errors = [
            abs(image[c, y, x] - guess[c, y, x])
            for c in range(3)
            for y in range(16)
            for x in range(16)
            if mask[y // 8, x // 8]
        ]
        expected.append(np.mean(errors))
    weights = torch.tensor([1.0, 0.0, 2.0])
    loss = objective(images, torch.zeros(3), weights, seeds)["loss"].detach()
    assert loss.item() == pytest.approx(expected[0] + 2 * expected[2], rel=1e-12)


@pytest.mark.parametrize("name", NETWORKS)
def test_prediction_does_not_depend_on_masked_pixels(name: str) -> None:
    objective, seeds = objective_of(name), make_seeds(2)
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64, requires_grad=True)
    cells = objective.masked_cells(images, seeds)
    (gradient,) = torch.autograd.grad(objective.predict(images, cells, seeds).square().sum(), images)
    masked = cells.repeat_interleave(8, 1).repeat_interleave(8, 2)[:, None].expand_as(images)
    assert gradient[masked].abs().max() == 0
    assert gradient[~masked].abs().min() > 0


@pytest.mark.parametrize("name", NETWORKS)
def test_linear_layer_predicts_the_pixels_under_each_token(name: str) -> None:
    """Each token's outputs, in the order channel, row, column, are the pixels under it."""
    objective = objective_of(name)
    with torch.no_grad():
        objective.decoder.weight.zero_()
        objective.decoder.bias.copy_(torch.arange(len(objective.decoder.bias)))
    side = objective.stride[0]
    predicted = objective.predict(torch.zeros(1, 3, 16, 16, dtype=torch.float64), torch.zeros(1, 2, 2, dtype=bool))
    tile = torch.arange(3 * side * side, dtype=torch.float64).view(3, side, side)
    assert torch.equal(predicted[0], tile.repeat(1, 16 // side, 16 // side))


def test_targets_are_normalized_in_boxes() -> None:
    images = torch.randn(2, 3, 7, 9, dtype=torch.float64)
    got = normalize_in_boxes(images, 5)
    for y, x in [(0, 0), (3, 4), (6, 2)]:
        box = images[:, :, max(y - 2, 0) : y + 3, max(x - 2, 0) : x + 3].flatten(2)
        expected = (images[:, :, y, x] - box.mean(-1)) / (box.var(-1) + 1e-6).sqrt()
        torch.testing.assert_close(got[:, :, y, x], expected)


def test_objective_removes_the_head_from_a_copy() -> None:
    net = make_swin()
    objective = make_objective(
        TrainConfig(model=net.config, objective="simmim", simmim=SimMIMConfig(mask_patch_size=8)), net, PREPROCESS
    )
    assert objective.net.config.num_classes == 0
    assert net.config.num_classes == 5
    assert objective.layer_id("mask_token") == 0
    assert objective.layer_id("decoder.weight") == net.config.depth + 1


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (BiTConfig(layers=(1,), width_factor=0.5), {}, "needs a plain ViT or a Swin Transformer; a BiT has no patches"),
        (
            ViTConfig(image_size=16, patch_size=16, depth=1),
            {"mask_patch_size": 8},
            "mask_patch_size=8 is not a multiple",
        ),
    ],
)
def test_networks_that_cannot_be_masked_are_refused(config: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SimMIMObjective(build(config, meta=True), SimMIMConfig(**options), PREPROCESS)


def test_one_cell_per_image_is_refused() -> None:
    with pytest.raises(ModelError, match=r"has one cell of simmim.mask_patch_size=16; try a smaller one"):
        simmim(mask_patch_size=16).masked_cells(torch.zeros(1, 3, 16, 16), make_seeds(1))


@pytest.mark.parametrize("options", [{"mask_ratio": 1.0}, {"normalize_box": 4}, {"mask_patch_size": 0}])
def test_impossible_settings_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"simmim.{next(iter(options))}"):
        SimMIMConfig(**options)


def test_swin_is_pretrained_at_other_sizes() -> None:
    objective = SimMIMObjective(
        build(SwinConfig(image_size=24, width=8, depths=(1, 1, 1), num_heads=(1, 1, 1)), 0),
        SimMIMConfig(mask_patch_size=8),
        PREPROCESS,
        seed=0,
    )
    images = torch.randn(2, 3, 24, 40)
    assert objective.predict(images, objective.masked_cells(images, make_seeds(2))).shape == images.shape

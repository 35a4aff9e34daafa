"""Masked patch prediction compared with slow reference code of the paper's appendix B.1.2."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from objectives.small_objectives import PREPROCESS, SMALL, make_net, make_seeds, masked_patch
from torch import Tensor

from vitrail.config import BiTConfig, PreprocessConfig, StemConfig, ViTConfig
from vitrail.config.image import preprocess_for_channels
from vitrail.config.train import MaskedPatchConfig, TrainConfig
from vitrail.errors import ConfigError, ModelError
from vitrail.models import build
from vitrail.objectives import MaskedPatchObjective, make_objective


def masked_patch_objective(target: str = "mean-color", mask_ratio: float = 0.5, **options: Any) -> MaskedPatchObjective:
    net = make_net(**options).double()
    preprocess = preprocess_for_channels(PREPROCESS, net.config.channels)
    objective = MaskedPatchObjective(
        net, MaskedPatchConfig(target=target, mask_ratio=mask_ratio), preprocess, seed=0
    ).double()
    torch.nn.init.normal_(objective.guess.weight)
    torch.nn.init.normal_(objective.guess.bias)
    return objective


def split_cells(image: np.ndarray, rows: int, columns: int) -> list[np.ndarray]:
    """Split an image C H W into a grid of cells, in reading order."""
    return [part for band in np.split(image, rows, 1) for part in np.split(band, columns, 2)]


def color_index(part: np.ndarray) -> int:
    """Color index of a part C p q in [0, 1]: 3 bits per channel mean, the first channel's are the highest."""
    index = 0
    for channel in part:
        index = 8 * index + min(max(math.floor(8 * channel.mean()), 0), 7)
    return index


@settings(max_examples=20)
@given(st.sampled_from([1, 3, 4]), st.sampled_from([(16, 16), (8, 24)]), st.sampled_from(["mean-color", "downsized"]))
def test_color_targets_are_three_bits_per_channel_mean(channels: int, size: tuple[int, int], target: str) -> None:
    objective = masked_patch_objective(target, channels=channels)
    images = torch.randn(2, channels, *size, dtype=torch.float64)
    grid = (size[0] // 4, size[1] // 4)
    got = objective.color_targets(images, grid)
    mean, std = objective.mean.numpy(), objective.std.numpy()
    for image, colors in zip(images.numpy(), got.tolist(), strict=True):
        for patch, patch_colors in zip(split_cells(image * std + mean, *grid), colors, strict=True):
            parts = split_cells(patch, 4, 4) if target == "downsized" else [patch]
            assert patch_colors == [color_index(part) for part in parts]
    assert int(got.max()) < 8**channels


def test_known_colors_have_known_indices() -> None:
    objective = MaskedPatchObjective(make_net(), MaskedPatchConfig(), PreprocessConfig(mean=(0, 0, 0), std=(1, 1, 1)))
    shades = torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.5, 0.0], [-0.2, 0.0, 1.3]])
    images = shades[:, :, None, None].expand(-1, -1, 4, 8)
    assert objective.color_targets(images, (1, 2))[:, 0, 0].tolist() == [0, 511, 448, 32, 7]


@settings(max_examples=15)
@given(st.floats(0.01, 1), st.integers(2, 40))
def test_patches_are_chosen_by_mask_ratio_without_repeats(mask_ratio: float, num_patches: int) -> None:
    chosen = masked_patch_objective(mask_ratio=mask_ratio).choose_patches(make_seeds(5), num_patches)
    assert chosen.shape == (5, max(round(mask_ratio * num_patches), 1))
    assert all(len(set(row)) == len(row) and min(row) >= 0 and max(row) < num_patches for row in chosen.tolist())


def test_patches_are_chosen_uniformly_and_corrupted_at_the_set_rates() -> None:
    objective, count = masked_patch_objective().float(), 4000
    with torch.no_grad():
        objective.mask_token.fill_(7)
    patches = torch.arange(16.0)[None, :, None].expand(count, -1, 16)
    chosen = objective.choose_patches(make_seeds(count), 16)
    frequency = torch.bincount(chosen.flatten(), minlength=16) / count
    assert ((frequency - 0.5).abs() < 5 * math.sqrt(0.25 / count)).all()
    out = objective.corrupt(patches, chosen, make_seeds(count)).detach()[..., 0]
    is_chosen = torch.zeros(count, 16, dtype=torch.bool).scatter(1, chosen, True)
    assert torch.equal(out[~is_chosen], patches[..., 0][~is_chosen]), "patches that are not chosen do not change"
    # The mask token is 7, which is also the value of one patch: exclude that patch.
    originals = patches[..., 0][is_chosen]
    before, after = originals[originals != 7], out[is_chosen][originals != 7]
    shares = {"masked": (after == 7), "kept": (after == before)}
    assert float(shares["kept"].float().mean()) == pytest.approx(0.1, abs=0.01)
    assert float(shares["masked"].float().mean()) == pytest.approx(0.8 + 0.1 / 15, abs=0.01)
    offsets = after[(after != before) & (after != 7)] - before[(after != before) & (after != 7)]
    assert set((offsets % 16).tolist()) == set(range(1, 16)), "any other patch, and never itself"


def reference_losses(objective: MaskedPatchObjective, images: Tensor, sample_seeds: Tensor) -> list[float]:
    """The loss of each image, one patch at a time."""
    net, image_losses = objective.net, []
    for image, seed in zip(images, sample_seeds, strict=True):
        chosen = objective.choose_patches(seed[None], math.prod(net.config.grid))
        x, grid = net.embed(image[None], corrupt=lambda p, c=chosen, k=seed: objective.corrupt(p, c, k[None]))
        final = net.norm(net.encode(x, grid))[0, net.config.num_prefix_tokens :]
        patches = split_cells(image.numpy(), *grid)
        mean, std = (v.numpy() for v in (objective.mean, objective.std))
        patch_losses = []
        for n in chosen[0].tolist():
            prediction = F.linear(final[n], objective.guess.weight, objective.guess.bias).detach().numpy()
            if objective.config.target == "pixels":
                patch_losses.append(np.mean((prediction - patches[n].flatten()) ** 2))
                continue
            parts = [patches[n]] if objective.config.target == "mean-color" else split_cells(patches[n], 4, 4)
            for scores, part in zip(np.split(prediction, len(parts)), parts, strict=True):
                color = color_index(part * std + mean)
                patch_losses.append(math.log(np.exp(scores).sum()) - scores[color])
        image_losses.append(float(np.mean(patch_losses)))
    return image_losses


@pytest.mark.parametrize("target", ["mean-color", "downsized", "pixels"])
@pytest.mark.parametrize(
    "options", [{}, {"pool": "map", "class_token": False}, {"position": "rope-2d", "num_registers": 2}]
)
def test_loss_matches_its_definition(target: str, options: dict[str, Any]) -> None:
    objective, sample_seeds = masked_patch_objective(target, **options), make_seeds(3)
    images = torch.randn(3, 3, 16, 16, dtype=torch.float64)
    expected = reference_losses(objective, images, sample_seeds)
    for weights in (torch.ones(3), torch.tensor([1.0, 0.0, 2.0])):
        got = objective(images, torch.zeros(3).long(), weights, sample_seeds)
        assert float(got["loss"].detach()) == pytest.approx(
            sum(w * v for w, v in zip(weights.tolist(), expected, strict=True)), rel=1e-9
        )
        assert ("correct" in got) == (target != "pixels")


@pytest.mark.parametrize("target", ["mean-color", "downsized"])
def test_perfect_predictor_has_zero_loss(target: str) -> None:
    objective, images = masked_patch_objective(target), torch.randn(2, 3, 16, 16, dtype=torch.float64)
    colors = objective.color_targets(images, (4, 4))
    constant = torch.full_like(images, 0.3)
    expected = objective.color_targets(constant, (4, 4))[0, 0]
    torch.nn.init.zeros_(objective.guess.weight)
    with torch.no_grad():
        objective.guess.bias.copy_(40 * F.one_hot(expected, 512).flatten())
    got = objective(constant, torch.zeros(2), torch.ones(2), make_seeds(2))
    assert float(got["correct"]) == 2
    assert float(got["loss"].detach()) == pytest.approx(0, abs=1e-9)
    assert colors.shape == (2, 16, 16 if target == "downsized" else 1)


def test_initial_prediction_is_uniform() -> None:
    objective = MaskedPatchObjective(make_net().double(), MaskedPatchConfig(), PREPROCESS, seed=0)
    got = objective(torch.randn(4, 3, 16, 16, dtype=torch.float64), torch.zeros(4), torch.ones(4), make_seeds(4))
    assert float(got["loss"].detach()) == pytest.approx(4 * math.log(512), rel=1e-12)
    second = MaskedPatchObjective(make_net().double(), MaskedPatchConfig(), PREPROCESS, seed=0)
    assert torch.equal(objective.mask_token, second.mask_token)


OPTIONS = [
    {},
    {"num_classes": 0},
    {"pool": "map", "class_token": False},
    {"pool": "gap", "pool_norm": "after", "class_token": False},
    {"pool": "token+gap"},
    {"pool_norm": "none"},
    {"distilled": True},
    {"pre_logits": 8},
    {"position": "none", "num_registers": 1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_trainable_parameter_has_a_gradient(options: dict[str, Any]) -> None:
    objective = masked_patch(net=make_net(**options))
    objective(torch.randn(2, 3, 16, 16), torch.zeros(2), torch.ones(2), make_seeds(2))["loss"].backward()
    unused = [n for n, p in objective.named_parameters() if p.requires_grad and p.grad is None]
    frozen = {n for n, p in objective.named_parameters() if not p.requires_grad}
    assert not unused
    assert objective.net.config.num_classes == objective.net.config.pre_logits == 0
    assert all(n.startswith("net.pool.") for n in frozen)


def test_given_network_keeps_its_head() -> None:
    net = make_net()
    objective = masked_patch(net=net)
    assert net.config.num_classes == 5
    assert objective.net is not net
    assert masked_patch(net=objective.net).net is objective.net, "a network without a head is not copied"


def test_other_image_sizes_and_uncovered_edges_are_supported() -> None:
    objective = masked_patch(net=make_net())
    got = objective(torch.randn(2, 3, 8, 24), torch.zeros(2), torch.ones(2), make_seeds(2))
    assert got["loss"].isfinite()
    edge_objective = masked_patch_objective("pixels", image_size=18, uncovered="ignore")
    images, sample_seeds = torch.randn(2, 3, 18, 18, dtype=torch.float64), make_seeds(2)
    a, b = (
        edge_objective(x, torch.zeros(2), torch.ones(2), sample_seeds)["loss"] for x in (images, images[:, :, :16, :16])
    )
    torch.testing.assert_close(a, b)


def test_objective_can_be_learned() -> None:
    """A few steps on images of two colors: far better than chance."""
    torch.manual_seed(0)
    objective = MaskedPatchObjective(
        build(ViTConfig(**SMALL | {"num_classes": 0}), seed=0), MaskedPatchConfig(), PREPROCESS, seed=0
    )
    optimizer = torch.optim.AdamW(objective.parameters(), lr=5e-3)
    for step in range(40):
        colors = torch.randint(2, (16, 1, 1, 1)) * 2.0 - 1
        images = colors.expand(-1, 3, 16, 16)
        output = objective(images, torch.zeros(16), torch.ones(16), make_seeds(16, step))
        (output["loss"] / 16).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert float(output["correct"]) / 16 > 0.9


def test_invalid_configurations_are_refused() -> None:
    config = TrainConfig(model=ViTConfig(**SMALL), objective="masked-patch")
    hybrid = build(
        ViTConfig(**SMALL | {"patch_size": 1, "image_size": 32}, stem=StemConfig(layers=(1, 1), width_factor=0.5))
    )
    with pytest.raises(ConfigError, match="plain ViT"):
        make_objective(config, hybrid, PREPROCESS)
    with pytest.raises(ConfigError, match="masked-patch needs a ViT"):
        make_objective(config, build(BiTConfig(layers=(1,), width_factor=0.5, num_classes=5)), PREPROCESS)
    with pytest.raises(ConfigError, match="too many colors"):
        masked_patch_objective(channels=5)
    with pytest.raises(ConfigError, match="needs patches of at least 4 x 4 px, got"):
        masked_patch_objective("downsized", patch_size=2)
    with pytest.raises(ModelError, match="at least 2 patches"):
        masked_patch(net=make_net())(torch.randn(1, 3, 4, 4), torch.zeros(1), torch.ones(1))

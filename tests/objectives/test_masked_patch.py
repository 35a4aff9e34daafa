"""Masked patch prediction against a transcription of the paper's appendix B.1.2, patch by patch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from objectives.learners import SMALL, WAY, masked, net_of, seeds_for
from torch import Tensor

from vitrail.config import BiTConfig, PreprocessConfig, StemConfig, ViTConfig
from vitrail.config.train import MaskedPatchConfig, TrainConfig
from vitrail.errors import ConfigError, ModelError
from vitrail.models import build
from vitrail.objectives import MaskedPatchObjective, make_objective
from vitrail.weights.model_info import preprocess_for_channels


def learner(target: str = "mean-color", share: float = 0.5, **options: Any) -> MaskedPatchObjective:
    net = net_of(**options).double()
    way = preprocess_for_channels(WAY, net.config.channels)
    found = MaskedPatchObjective(net, MaskedPatchConfig(target=target, mask_ratio=share), way, seed=0).double()
    torch.nn.init.normal_(found.guess.weight)
    torch.nn.init.normal_(found.guess.bias)
    return found


def cells(image: np.ndarray, rows: int, columns: int) -> list[np.ndarray]:
    """C H W -> its parts in reading order."""
    return [part for band in np.split(image, rows, 1) for part in np.split(band, columns, 2)]


def color_of(part: np.ndarray) -> int:
    """C p q in [0, 1] -> 3 bits of each channel's mean, the first channel's the highest."""
    number = 0
    for channel in part:
        number = 8 * number + min(max(math.floor(8 * channel.mean()), 0), 7)
    return number


@settings(max_examples=20)
@given(st.sampled_from([1, 3, 4]), st.sampled_from([(16, 16), (8, 24)]), st.sampled_from(["mean-color", "downsized"]))
def test_colors_are_three_bits_of_the_mean_of_a_patch_or_of_its_sixteenths(
    channels: int, size: tuple[int, int], target: str
) -> None:
    one = learner(target, channels=channels)
    images = torch.randn(2, channels, *size, dtype=torch.float64)
    grid = (size[0] // 4, size[1] // 4)
    got = one.color_targets(images, grid)
    mean, std = one.mean.numpy(), one.std.numpy()
    for image, colors in zip(images.numpy(), got.tolist(), strict=True):
        for patch, found in zip(cells(image * std + mean, *grid), colors, strict=True):
            parts = cells(patch, 4, 4) if target == "downsized" else [patch]
            assert found == [color_of(part) for part in parts]
    assert int(got.max()) < 8**channels


def test_known_colors_have_known_numbers() -> None:
    one = MaskedPatchObjective(net_of(), MaskedPatchConfig(), PreprocessConfig(mean=(0, 0, 0), std=(1, 1, 1)))
    shades = torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.5, 0.0], [-0.2, 0.0, 1.3]])
    images = shades[:, :, None, None].expand(-1, -1, 4, 8)
    assert one.color_targets(images, (1, 2))[:, 0, 0].tolist() == [0, 511, 448, 32, 7]


@settings(max_examples=15)
@given(st.floats(0.01, 1), st.integers(2, 40))
def test_exactly_the_share_is_chosen_without_repeats(share: float, patches: int) -> None:
    chosen = learner(share=share).choose_patches(seeds_for(5), patches)
    assert chosen.shape == (5, max(round(share * patches), 1))
    assert all(len(set(row)) == len(row) and min(row) >= 0 and max(row) < patches for row in chosen.tolist())


def test_every_patch_is_chosen_equally_often_and_corrupted_as_often_as_told() -> None:
    one, count = learner().float(), 4000
    with torch.no_grad():
        one.mask_token.fill_(7)
    patches = torch.arange(16.0)[None, :, None].expand(count, -1, 16)
    chosen = one.choose_patches(seeds_for(count), 16)
    often = torch.bincount(chosen.flatten(), minlength=16) / count
    assert ((often - 0.5).abs() < 5 * math.sqrt(0.25 / count)).all()
    out = one.corrupt(patches, chosen, seeds_for(count)).detach()[..., 0]
    hit = torch.zeros(count, 16, dtype=torch.bool).scatter(1, chosen, True)
    assert torch.equal(out[~hit], patches[..., 0][~hit]), "what is not chosen stays"
    # The mask token is 7, which is also the number of one patch: leave that one out.
    mine = patches[..., 0][hit]
    was, now = mine[mine != 7], out[hit][mine != 7]
    shares = {"masked": (now == 7), "kept": (now == was)}
    assert float(shares["kept"].float().mean()) == pytest.approx(0.1, abs=0.01)
    assert float(shares["masked"].float().mean()) == pytest.approx(0.8 + 0.1 / 15, abs=0.01)
    moved = now[(now != was) & (now != 7)] - was[(now != was) & (now != 7)]
    assert set((moved % 16).tolist()) == set(range(1, 16)), "any other patch, and never itself"


def by_hand(one: MaskedPatchObjective, images: Tensor, sample_seeds: Tensor) -> list[float]:
    """The loss of each image, one patch at a time."""
    net, found = one.net, []
    for image, key in zip(images, sample_seeds, strict=True):
        chosen = one.choose_patches(key[None], math.prod(net.config.grid))
        x, grid = net.embed(image[None], corrupt=lambda p, c=chosen, k=key: one.corrupt(p, c, k[None]))
        final = net.norm(net.encode(x, grid))[0, net.config.num_prefix_tokens :]
        shown = cells(image.numpy(), *grid)
        mean, std = (v.numpy() for v in (one.mean, one.std))
        losses = []
        for n in chosen[0].tolist():
            said = F.linear(final[n], one.guess.weight, one.guess.bias).detach().numpy()
            if one.config.target == "pixels":
                losses.append(np.mean((said - shown[n].flatten()) ** 2))
                continue
            parts = [shown[n]] if one.config.target == "mean-color" else cells(shown[n], 4, 4)
            for scores, part in zip(np.split(said, len(parts)), parts, strict=True):
                color = color_of(part * std + mean)
                losses.append(math.log(np.exp(scores).sum()) - scores[color])
        found.append(float(np.mean(losses)))
    return found


@pytest.mark.parametrize("target", ["mean-color", "downsized", "pixels"])
@pytest.mark.parametrize(
    "options", [{}, {"pool": "map", "class_token": False}, {"position": "rope-2d", "num_registers": 2}]
)
def test_the_loss_is_its_definition(target: str, options: dict[str, Any]) -> None:
    one, sample_seeds = learner(target, **options), seeds_for(3)
    images = torch.randn(3, 3, 16, 16, dtype=torch.float64)
    expected = by_hand(one, images, sample_seeds)
    for weights in (torch.ones(3), torch.tensor([1.0, 0.0, 2.0])):
        got = one(images, torch.zeros(3).long(), weights, sample_seeds)
        assert float(got["loss"].detach()) == pytest.approx(
            sum(w * v for w, v in zip(weights.tolist(), expected, strict=True)), rel=1e-9
        )
        assert ("correct" in got) == (target != "pixels")


@pytest.mark.parametrize("target", ["mean-color", "downsized"])
def test_an_oracle_is_always_right(target: str) -> None:
    one, images = learner(target), torch.randn(2, 3, 16, 16, dtype=torch.float64)
    colors = one.color_targets(images, (4, 4))
    constant = torch.full_like(images, 0.3)
    expected = one.color_targets(constant, (4, 4))[0, 0]
    torch.nn.init.zeros_(one.guess.weight)
    with torch.no_grad():
        one.guess.bias.copy_(40 * F.one_hot(expected, 512).flatten())
    got = one(constant, torch.zeros(2), torch.ones(2), seeds_for(2))
    assert float(got["correct"]) == 2
    assert float(got["loss"].detach()) == pytest.approx(0, abs=1e-9)
    assert colors.shape == (2, 16, 16 if target == "downsized" else 1)


def test_a_fresh_guess_is_uniform() -> None:
    one = MaskedPatchObjective(net_of().double(), MaskedPatchConfig(), WAY, seed=0)
    got = one(torch.randn(4, 3, 16, 16, dtype=torch.float64), torch.zeros(4), torch.ones(4), seeds_for(4))
    assert float(got["loss"].detach()) == pytest.approx(4 * math.log(512), rel=1e-12)
    other = MaskedPatchObjective(net_of().double(), MaskedPatchConfig(), WAY, seed=0)
    assert torch.equal(one.mask_token, other.mask_token)


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
def test_what_takes_no_part_is_not_waited_for(options: dict[str, Any]) -> None:
    one = masked(net=net_of(**options))
    one(torch.randn(2, 3, 16, 16), torch.zeros(2), torch.ones(2), seeds_for(2))["loss"].backward()
    unused = [n for n, p in one.named_parameters() if p.requires_grad and p.grad is None]
    frozen = {n for n, p in one.named_parameters() if not p.requires_grad}
    assert not unused
    assert one.net.config.num_classes == one.net.config.pre_logits == 0
    assert all(n.startswith("net.pool.") for n in frozen)


def test_the_network_given_keeps_its_head() -> None:
    net = net_of()
    one = masked(net=net)
    assert net.config.num_classes == 5
    assert one.net is not net
    assert masked(net=one.net).net is one.net, "nothing to take off, nothing to copy"


def test_other_sizes_and_left_out_edges_are_fine() -> None:
    one = masked(net=net_of())
    got = one(torch.randn(2, 3, 8, 24), torch.zeros(2), torch.ones(2), seeds_for(2))
    assert got["loss"].isfinite()
    edged = learner("pixels", image_size=18, uncovered="ignore")
    images, sample_seeds = torch.randn(2, 3, 18, 18, dtype=torch.float64), seeds_for(2)
    a, b = (edged(x, torch.zeros(2), torch.ones(2), sample_seeds)["loss"] for x in (images, images[:, :, :16, :16]))
    torch.testing.assert_close(a, b)


def test_learning_it_works() -> None:
    """A few steps on images of two colors: far better than chance."""
    torch.manual_seed(0)
    one = MaskedPatchObjective(build(ViTConfig(**SMALL | {"num_classes": 0}), seed=0), MaskedPatchConfig(), WAY, seed=0)
    optimizer = torch.optim.AdamW(one.parameters(), lr=5e-3)
    for step in range(40):
        sides = torch.randint(2, (16, 1, 1, 1)) * 2.0 - 1
        images = sides.expand(-1, 3, 16, 16)
        found = one(images, torch.zeros(16), torch.ones(16), seeds_for(16, step))
        (found["loss"] / 16).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert float(found["correct"]) / 16 > 0.9


def test_what_cannot_be_is_said_at_once() -> None:
    config = TrainConfig(model=ViTConfig(**SMALL), objective="masked-patch")
    hybrid = build(
        ViTConfig(**SMALL | {"patch_size": 1, "image_size": 32}, stem=StemConfig(layers=(1, 1), width_factor=0.5))
    )
    with pytest.raises(ConfigError, match="plain ViT"):
        make_objective(config, hybrid, WAY)
    with pytest.raises(ConfigError, match="a BiT has none"):
        make_objective(config, build(BiTConfig(layers=(1,), width_factor=0.5, num_classes=5)), WAY)
    with pytest.raises(ConfigError, match="too many colors"):
        learner(channels=5)
    with pytest.raises(ConfigError, match="needs patches of at least 4 x 4 px, got"):
        learner("downsized", patch_size=2)
    with pytest.raises(ModelError, match="at least 2 patches"):
        masked(net=net_of())(torch.randn(1, 3, 4, 4), torch.zeros(1), torch.ones(1))

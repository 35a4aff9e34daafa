"""Explanations of Swin Transformers, compared with explicit products of matrices between all tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from compare import randomized
from small_models import LABELS, gradient
from torch import Tensor

import vitrail
from vitrail.config import PreprocessConfig, SwinConfig
from vitrail.errors import ModelError
from vitrail.explain import attention_distance, attention_maps, gradient_rollout, occlusion, rollout_map
from vitrail.explain.steps import explain_steps, supported_methods
from vitrail.explain.swin_attention import SwinQueryAttention, on_patches, unmerge
from vitrail.models import Swin, build
from vitrail.weights.model_info import ModelInfo

TINY: dict[str, Any] = {
    "image_size": (36, 44), "patch_size": 4, "width": 8, "depths": (2, 1, 2), "num_heads": (1, 2, 4), "window_size": 3,
    "num_classes": 5,
}  # fmt: skip
"""Maps of 9 x 11, 5 x 6 and 3 x 3 tokens: padded windows, shifts, merges of odd sides."""


def tiny(**changes: Any) -> Swin:
    net = randomized(build(SwinConfig(**TINY | changes)))
    assert isinstance(net, Swin)
    return net


def places_of_windows(net: Swin, stage: int, block: int, grid: tuple[int, int]) -> Tensor:
    """nW N: the token at each place of each window, -1 for padding, by padding and rolling a map of numbers."""
    size, shift = net.config.window_placement(stage).on(grid)
    shift = shift if block % 2 else (0, 0)
    numbers = torch.arange(grid[0] * grid[1]).view(grid) + 1
    padding = [-side % window for side, window in zip(grid, size, strict=True)]
    if net.config.window_rule == "timm":
        numbers = torch.roll(numbers, (-shift[0], -shift[1]), (0, 1))
    numbers = F.pad(numbers, (0, padding[1], 0, padding[0]))
    if net.config.window_rule != "timm":
        numbers = torch.roll(numbers, (-shift[0], -shift[1]), (0, 1))
    cut = numbers.unfold(0, size[0], size[0]).unfold(1, size[1], size[1])
    return cut.flatten(2).flatten(0, 1) - 1


def dense(values: Tensor, places: Tensor, tokens: int) -> Tensor:
    """nW N N -> T T."""
    whole = torch.zeros(tokens, tokens, dtype=values.dtype)
    for window, places_of_window in zip(values, places.tolist(), strict=True):
        for i, query in enumerate(places_of_window):
            for j, key in enumerate(places_of_window):
                if query >= 0 and key >= 0:
                    whole[query, key] = window[i, j]
    return whole


def merging_matrix(grid: tuple[int, int]) -> Tensor:
    """T/4 T: a quarter of each of the tokens that are merged."""
    after = -(-grid[0] // 2), -(-grid[1] // 2)
    matrix = torch.zeros(after[0] * after[1], grid[0] * grid[1])
    for row in range(grid[0]):
        for column in range(grid[1]):
            matrix[row // 2 * after[1] + column // 2, row * grid[1] + column] = 1 / 4
    return matrix


def explicit_product(net: Swin, factors: list[Tensor]) -> Tensor:
    """The factors of all blocks in order, and merges between stages -> h w: the mean row of their product."""
    grids = net.config.stage_grids(net.config.grid)
    product, number = torch.eye(grids[0][0] * grids[0][1]), 0
    for stage, depth in enumerate(net.config.depths):
        if stage:
            product = merging_matrix(grids[stage - 1]) @ product
        for _ in range(depth):
            product = factors[number] @ product
            number += 1
    return product.mean(0).view(grids[0])


def blocks_of(net: Swin) -> list[tuple[int, int]]:
    return [(stage, block) for stage, depth in enumerate(net.config.depths) for block in range(depth)]


@pytest.mark.parametrize("rule", ["torchvision", "timm"])
@pytest.mark.parametrize("version", [1, 2])
def test_rollout_equals_the_explicit_product(version: int, rule: str) -> None:
    net, images = tiny(version=version, window_rule=rule), torch.randn(2, 3, 36, 44)
    grids = net.config.stage_grids(net.config.grid)
    attention = net.features(images, "attention").attention
    for image, found in enumerate(rollout_map(net, images)):
        factors = []
        for (stage, block), weights in zip(blocks_of(net), attention, strict=True):
            tokens = grids[stage][0] * grids[stage][1]
            places = places_of_windows(net, stage, block, grids[stage])
            heads = torch.stack([dense(head, places, tokens) for head in weights[image].transpose(0, 1)])
            among = (heads / heads.sum(-1, keepdim=True)).mean(0)
            factors.append((among + torch.eye(tokens)) / 2)
        expected = explicit_product(net, factors)
        torch.testing.assert_close(found, expected / expected.sum())


@pytest.mark.parametrize("version", [1, 2])
def test_gradient_rollout_equals_the_explicit_product(version: int) -> None:
    net, images, target = tiny(version=version), torch.randn(1, 3, 36, 44), torch.tensor([2])
    grids = net.config.stage_grids(net.config.grid)
    x, grid = net.embed(images)
    weights: list[Tensor] = []
    for stage in net.stages:
        if stage.merge is not None:
            x, grid = stage.merge(x, grid), (-(-grid[0] // 2), -(-grid[1] // 2))
        for block in stage.blocks:
            x = block(x, grid, weights)
    score = net.head(net.norm(x).mean(1))[0, 2]
    factors = []
    for (stage, block), w, g in zip(blocks_of(net), weights, torch.autograd.grad(score, weights), strict=True):
        tokens, heads = grids[stage][0] * grids[stage][1], net.config.num_heads[stage]
        relevance = (w * g).clamp(min=0).detach().reshape(-1, heads, *w.shape[-2:]).mean(1)  # nW N N
        factors.append(torch.eye(tokens) + dense(relevance, places_of_windows(net, stage, block, grids[stage]), tokens))
    torch.testing.assert_close(gradient_rollout(net, images, target)[0], explicit_product(net, factors))


def test_attention_of_a_patch_stays_inside_its_shifted_window() -> None:
    net, images = tiny(depths=(2,), num_heads=(2,), image_size=32, window_size=4), torch.randn(1, 3, 32, 32)
    collected = SwinQueryAttention(net, images, (3, 7))
    for step in explain_steps(net, images, layers=None):
        if hasattr(step, "weights"):
            collected.add(step.weights)
    maps, prefix = collected.maps()
    assert maps.shape == (2, 1, 2, 8, 8)
    assert prefix.shape == (2, 1, 2, 0)
    torch.testing.assert_close(maps.sum((-1, -2)), torch.ones(2, 1, 2))
    rows, columns = (maps[0, 0, 0] > 0).nonzero(as_tuple=True)
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (0, 3, 4, 7)  # the window's corner: rows 1 to 4
    rows, columns = (maps[1, 0, 0] > 1e-9).nonzero(as_tuple=True)  # shifted by 2: rows 3 to 6; columns 7 and 8 alone
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (2, 5, 6, 7)


def test_later_maps_are_drawn_on_the_patches_they_were_merged_from() -> None:
    row = torch.rand(2, 3, 3)
    shares = unmerge(row, (5, 6))
    torch.testing.assert_close(shares[:, :2, :2].sum((1, 2)), row[:, 0, 0])
    torch.testing.assert_close(shares[:, 4:, 4:].sum((1, 2)), row[:, 2, 2] / 2)  # the other half is padding's
    patches = on_patches(row.flatten(1), ((9, 11), (5, 6), (3, 3)))
    assert patches.shape == (2, 9, 11)
    torch.testing.assert_close(patches.sum((1, 2)), row.sum((1, 2)))


def test_equal_weights_of_a_later_map_are_an_even_map() -> None:
    """Tokens at the odd side of a map cover fewer patches; their weight per patch is that of the others."""
    even = on_patches(torch.full((9,), 1 / 9), ((9, 11), (5, 6), (3, 3)))
    torch.testing.assert_close(even, torch.full((9, 11), 1 / 99))


@pytest.mark.parametrize("version", [1, 2])
def test_explain_gives_all_maps_on_the_grid_of_patches(version: int, tmp_path: Any) -> None:
    config = SwinConfig(**TINY | {"image_size": 32, "version": version})
    info = ModelInfo(config=config, preprocess=PreprocessConfig(image_size=32), labels=LABELS)
    model = vitrail.Model(randomized(build(config)), info)
    explanation = model.explain(gradient(), faithfulness=True)
    assert {name: values.shape for name, values in explanation.maps.items()} == dict.fromkeys(
        ("rollout", "gradient", "attention", "occlusion"), (8, 8)
    )
    views = explanation.attention
    assert views is not None
    assert views.shape == (5, 4, 8, 8)
    counts = [int((~np.isnan(layer).any((1, 2))).sum()) for layer in views]
    assert counts == [1, 1, 2, 4, 4]
    for layer, count in zip(views, counts, strict=True):
        np.testing.assert_allclose(layer[:count].sum((1, 2)), 1, rtol=1e-5)
    np.testing.assert_allclose(explanation.maps["attention"], views[-1].mean(0), rtol=1e-5)
    written = explanation.save(tmp_path, ("png", "npz"), layers=(1, -1), stem="swin")
    assert [path.name for path in written] == [
        "swin-overview.png", "swin-layers.png", "swin-faithfulness.png", "swin-heads-1.png", "swin-heads-5.png",
        "swin.npz",
    ]  # fmt: skip


def test_methods_and_queries_that_do_not_apply_are_refused() -> None:
    net, images = tiny(), torch.randn(1, 3, 36, 44)
    assert supported_methods(net, has_classes=True) == ("rollout", "gradient", "attention", "occlusion")
    with pytest.raises(ModelError, match="unknown query 'class': a Swin Transformer has no class token"):
        rollout_map(net, images, "class")
    with pytest.raises(ModelError, match="there is no patch in row 10, column 1: the grid has rows 1 to 9"):
        rollout_map(net, images, (10, 1))
    for function in (attention_maps, attention_distance):
        with pytest.raises(ModelError, match="a Swin Transformer has no attention between all tokens"):
            function(net, images)


def test_occlusion_masks_squares_of_whole_tokens_of_the_third_map() -> None:
    net, images = tiny(image_size=64), torch.randn(1, 3, 64, 64)
    values = occlusion(net, images, torch.tensor([1]), stride=2)[0]
    assert values.shape == (16, 16)
    squares = values.view(2, 8, 2, 8)
    assert (squares == squares[:, :1, :, :1]).all()
    masked = images.clone()
    masked[:, :, :32, 32:] = images.mean((2, 3), keepdim=True)
    with torch.no_grad():
        drop = net(images).softmax(1)[0, 1] - net(masked).softmax(1)[0, 1]
    assert float(values[0, -1]) == pytest.approx(float(drop), abs=1e-6)

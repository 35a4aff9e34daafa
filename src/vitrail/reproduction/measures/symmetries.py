"""What a network does when the patches of its images change places, when images are shifted, when one patch changes.

The comparisons that should be exact are computed in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy

import torch
from torch import Tensor

from vitrail.models import Net, ViT
from vitrail.models.layers import Block
from vitrail.reproduction.measures.evaluation_images import evaluation_images, predict, untrained_network
from vitrail.training.runs import Run

# B images of C channels; N = n n patches of p x q pixels; T tokens, prefix tokens first; D width

NUM_IMAGES = 2000
"""Test images whose predictions are compared, at most."""
NUM_EXACT = 32
"""Test images whose outputs are compared in float64."""
NUM_ORDERS = 4
"""Random orders of the patches."""
NUM_CHANGED = 4
"""Tokens that are changed, one at a time."""
CHANGED = 1e-9
"""A token has changed if the relative difference is larger than this."""
DIRECTIONS = ((1, 0), (-1, 0), (0, 1), (0, -1))


def symmetry(run: Run, per_side: int) -> dict[str, float]:
    """Numbers of the trained model; with the suffix `, untrained` those of its initial weights.

    per_side: patches per side of an image, for networks without patches too.

    accuracy                      of the images as they are; `, shuffled`: with their patches in random order;
                                  `, I px`: after a cyclic shift by I pixels, the mean of four directions
    agreement, shuffled or I px   fraction of the predictions that are unchanged
    logit change, feature change  relative difference of the logits, or of the input of the head, when the patches are
                                  shuffled: the mean over images; with `, largest` the maximum

    and for a ViT those of `token_equivariance` and `reaches`.
    """
    images, classes, _ = evaluation_images(run, NUM_IMAGES)
    net = run.model.to(run.config.device).net
    found = prediction_numbers(net, images, classes, per_side)
    exact = images[:NUM_EXACT].double()
    for suffix, each in (("", net), (", untrained", untrained_network(run))):
        numbers = exact_numbers(deepcopy(each).double().eval(), exact, per_side)
        found |= {name + suffix: value for name, value in numbers.items()}
    return found


def patch_orders(count: int) -> Iterator[Tensor]:
    """NUM_ORDERS random orders of the patches, each N, the same in every call."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(NUM_ORDERS):
        yield torch.randperm(count, generator=generator)


def shuffle_patches(images: Tensor, order: Tensor, per_side: int) -> Tensor:
    """B C H W -> the same with patch i taken from patch order[i], patches counted row by row."""
    cut = images.unflatten(3, (per_side, -1)).unflatten(2, (per_side, -1))  # B C n p n q
    patches = cut.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)[:, order.to(images.device)]  # B N C p q
    cut = patches.unflatten(1, (per_side, per_side)).permute(0, 3, 1, 4, 2, 5)  # B C n p n q
    return cut.flatten(4, 5).flatten(2, 3)


def shift(images: Tensor, rows: int, columns: int) -> Tensor:
    """Cyclic shift, B C H W: what leaves at one side comes in at the other, so that no content is lost."""
    return images.roll((rows, columns), (2, 3))


def prediction_numbers(net: Net, images: Tensor, classes: Tensor, per_side: int) -> dict[str, float]:
    """Accuracy and unchanged predictions on shuffled and shifted images."""
    before = predict(net, images)

    def compare(name: str, versions: Iterator[Tensor]) -> dict[str, float]:
        after = torch.stack([predict(net, version) for version in versions])
        return {
            f"agreement, {name}": float((after == before).double().mean()),
            f"accuracy, {name}": float((after == classes).double().mean()),
        }

    found = {"accuracy": float((before == classes).double().mean())}
    found |= compare("shuffled", (shuffle_patches(images, order, per_side) for order in patch_orders(per_side**2)))
    for pixels in shifts(images.shape[2], per_side):
        found |= compare(f"{pixels} px", (shift(images, pixels * y, pixels * x) for y, x in DIRECTIONS))
    return found


def shifts(image_size: int, per_side: int) -> range:
    """The shifts in pixels: up to two patches."""
    return range(1, 2 * (image_size // per_side) + 1)


@torch.no_grad()
def exact_numbers(net: Net, images: Tensor, per_side: int) -> dict[str, float]:
    """Relative differences of outputs, for a network and images in float64."""
    before, changes = net.features(images, outputs=("logits", "pooled")), []
    for order in patch_orders(per_side**2):
        after = net.features(shuffle_patches(images, order, per_side), outputs=("logits", "pooled"))
        pairs = ((after.logits, before.logits), (after.pooled, before.pooled))
        changes.append(torch.stack([relative_change(x, y) for x, y in pairs]))  # 2 B
    found: dict[str, float] = {}
    for name, each in zip(("logit change", "feature change"), torch.stack(changes, 1), strict=True):
        if bool(each.isfinite().all()):  # the logits of an untrained network are zero
            found |= {name: float(each.mean()), f"{name}, largest": float(each.max())}
    if isinstance(net, ViT):
        found |= {"token equivariance": token_equivariance(net, images, per_side), **reaches(net, images)}
    return found


def relative_change(after: Tensor | None, before: Tensor | None) -> Tensor:
    """B ... each -> B: norm of the difference over that of `before`; NaN or infinite where that is zero."""
    assert after is not None
    assert before is not None
    return (after - before).flatten(1).norm(dim=1) / before.flatten(1).norm(dim=1)


def patch_tokens(net: ViT, images: Tensor) -> Tensor:
    """B N D: the patch tokens after the last block."""
    maps = net.features(images, outputs="patch_maps", layers=[-1]).patch_maps
    assert maps is not None
    return maps[0].flatten(1, 2)


def token_equivariance(net: ViT, images: Tensor, per_side: int) -> float:
    """Largest relative difference between the tokens of shuffled patches and the shuffled tokens: 0 if equivariant."""
    before = patch_tokens(net, images)
    return max(
        float(relative_change(patch_tokens(net, shuffle_patches(images, order, per_side)), before[:, order]).max())
        for order in patch_orders(per_side**2)
    )


def reaches(net: ViT, images: Tensor) -> dict[str, float]:
    """Fraction of the other tokens that change when one token, or the pixels of one patch, change; in the first block.

    attention reach, MLP reach    output of the attention or of the MLP when one of its input tokens changes
    patch reach, embedding        input of the first block when the pixels of one patch change
    patch reach, first block      its output
    """
    block, num_prefix = net.blocks[0], net.config.num_prefix_tokens
    assert isinstance(block, Block)
    tokens, grid = net.embed(images)
    inputs, state = net.apply_position(0, tokens, grid, None)
    normed, output = block.norm1(inputs), block(inputs, state)
    normed_again = block.norm2(inputs + block.scale_and_drop(block.attention(normed, state), block.scale1, None))
    found: dict[str, list[Tensor]] = {}
    for patch in torch.linspace(0, grid[0] * grid[1] - 1, NUM_CHANGED).round().int().unique().tolist():
        token = num_prefix + patch
        embedded, _ = net.embed(_change_patch(images, patch, grid))
        placed, _ = net.apply_position(0, embedded, grid, None)
        pairs = {
            "attention reach": (block.attention(normed, state), block.attention(_change(normed, token), state)),
            "MLP reach": (block.mlp(normed_again), block.mlp(_change(normed_again, token))),
            "patch reach, embedding": (tokens, embedded),
            "patch reach, first block": (output, block(placed, state)),
        }
        for name, (before, after) in pairs.items():
            found.setdefault(name, []).append(_reach(before, after, token))
    return {name: float(torch.cat(shares).mean()) for name, shares in found.items()}


def _change(tokens: Tensor, index: int) -> Tensor:
    """B T D with one token replaced by that of the next image."""
    changed = tokens.clone()
    changed[:, index] = tokens.roll(1, 0)[:, index] + 1
    return changed


def _change_patch(images: Tensor, patch: int, grid: tuple[int, int]) -> Tensor:
    """B C H W with the pixels of one patch changed."""
    height, width = images.shape[2] // grid[0], images.shape[3] // grid[1]
    top, left = patch // grid[1] * height, patch % grid[1] * width
    changed = images.clone()
    changed[:, :, top : top + height, left : left + width] += 1
    return changed


def _reach(before: Tensor, after: Tensor, index: int) -> Tensor:
    """B T D each -> B: fraction of the tokens other than `index` that differ."""
    changed = (after - before).norm(dim=2) > CHANGED * before.norm(dim=2)  # B T
    others = torch.arange(before.shape[1], device=before.device) != index
    return changed[:, others].double().mean(1)

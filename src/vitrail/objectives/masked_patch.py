"""Masked patch prediction, the paper's self-supervised objective (appendix B.1.2)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail import rng
from vitrail.config import PreprocessConfig, pair
from vitrail.config.train import MaskedPatchConfig
from vitrail.errors import ConfigError, ModelError
from vitrail.kernels.compute_once import compute_once
from vitrail.models import Net, ViT, init
from vitrail.models.drop import check_sample_seeds, random_sample_seeds
from vitrail.models.position import Grid
from vitrail.objectives.base import Objective, Sums, at_least_float32, weighted_sums

# b images, C channels, N patches in h rows and w columns, M of them corrupted, D width, p q height and width
# of a patch in pixels, S side of the downsized patch, Q colors

COLOR_LEVELS = 8
"""Levels per color channel: 3 bits."""
DOWNSIZED_SIDE = 4
MAX_CHANNELS = 4
"""With more channels there are too many color classes."""

PATCH_CHOICE = rng.stream_id("patches to corrupt")
CORRUPTION = rng.stream_id("how a patch is corrupted")
REPLACEMENT_PATCH = rng.stream_id("another patch in its place")


class MaskedPatchObjective(Objective):
    """Corrupt round(mask_ratio * N) patches of each image, at least one, and predict them with a linear layer.

    Before positions are added, the embedding of each chosen patch is replaced by a learned mask token with
    probability `mask_token_prob`, by that of another patch of the same image with probability
    `random_patch_prob`, and otherwise kept. The linear layer takes the patch token after the last block and
    the final norm. The loss of an image is the mean over its chosen patches. Target mean-color: cross-entropy
    of the patch's mean color (8 levels per channel; 512 classes for RGB, 8 for gray). downsized: the mean
    cross-entropy of the 16 colors of the patch downsized to 4 x 4. pixels: mean squared error of the
    normalized values. "correct" is the fraction of colors predicted correctly.

    Labels are not used. The head is removed (from a copy of the model); an attention pool is not trained.
    Hybrids are refused: their convolutions mix neighboring patches before any patch is masked.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, net: Net, config: MaskedPatchConfig, preprocess: PreprocessConfig, seed: int | None = None
    ) -> None:
        if not isinstance(net, ViT):
            raise ConfigError("objective=masked-patch needs a ViT; for a Swin Transformer, try objective=simmim.")
        _check_supported(net, config)
        super().__init__(_without_head(net))
        self.config, like = config, net.patch.weight
        self.side = DOWNSIZED_SIDE if config.target == "downsized" else 1
        self.colors = COLOR_LEVELS**net.config.channels
        self.mask_token = nn.Parameter(like.new_empty(net.config.width))
        pixels = net.config.channels * math.prod(pair(net.config.patch_size))
        outputs = pixels if config.target == "pixels" else self.side**2 * self.colors
        self.guess = nn.Linear(net.config.width, outputs, device=like.device, dtype=like.dtype)
        for name in ("mean", "std"):
            values = torch.tensor(getattr(preprocess, name), device=like.device)[:, None, None]
            self.register_buffer(name, values, persistent=False)
        self.initialize(seed)

    @torch.no_grad()
    def initialize(self, seed: int | None = None) -> None:
        """Initialize the prediction layer to zero, like the paper's heads."""
        init.normal_(self.mask_token, 0.02, init.generator_for(self.mask_token, seed))
        nn.init.zeros_(self.guess.weight)
        nn.init.zeros_(self.guess.bias)

    def forward(self, images: Tensor, targets: Tensor, weights: Tensor, sample_seeds: Tensor | None = None) -> Sums:
        net = self.net
        assert isinstance(net, ViT)
        sample_seeds = random_sample_seeds(images) if sample_seeds is None else sample_seeds
        check_sample_seeds(sample_seeds, images)
        chosen = self.choose_patches(sample_seeds, math.prod(net.config.grid_of((images.shape[2], images.shape[3]))))
        drawn = net.resolve_sample_seeds(images, sample_seeds)
        x, grid = net.embed(images, drawn, corrupt=lambda patches: self.corrupt(patches, chosen, sample_seeds))
        x = net.encode(x, grid, sample_seeds=drawn)
        predicted = at_least_float32(
            self.guess(net.norm(_gather_patches(x[:, net.config.num_prefix_tokens :], chosen)))
        )  # b M ...
        if self.config.target == "pixels":
            expected = _gather_patches(self.pixel_targets(images), chosen)
            return weighted_sums({"loss": (predicted - expected).square().mean((1, 2))}, weights)
        expected = _gather_patches(self.color_targets(images, grid), chosen)  # b M SS
        predicted = predicted.unflatten(-1, (-1, self.colors))  # b M SS Q
        loss = F.cross_entropy(predicted.flatten(0, 2), expected.flatten(), reduction="none").view(expected.shape)
        correct = (predicted.argmax(-1) == expected).to(torch.float32)
        return weighted_sums({"loss": loss.mean((1, 2)), "correct": correct.mean((1, 2))}, weights)

    def choose_patches(self, sample_seeds: Tensor, patches: int) -> Tensor:
        """Indices of the corrupted patches, b M, drawn uniformly without replacement."""
        if patches < 2:
            raise ModelError("masked-patch prediction needs at least 2 patches, got 1; try larger images.")
        count = max(round(self.config.mask_ratio * patches), 1)
        return rng.bits(sample_seeds, PATCH_CHOICE, patches).argsort(1)[:, :count]

    def corrupt(self, patches: Tensor, chosen: Tensor, sample_seeds: Tensor) -> Tensor:
        """Replace the chosen patch embeddings, b N D -> b N D."""
        count = patches.shape[1]
        how = compute_once(rng.uniform(sample_seeds, CORRUPTION, chosen.shape[1]))  # b M in [0, 1)
        other = compute_once(
            (chosen + 1 + rng.bits(sample_seeds, REPLACEMENT_PATCH, chosen.shape[1]) % (count - 1)) % count
        )  # not itself
        masked, kept = (
            how < self.config.mask_token_prob,
            how >= self.config.mask_token_prob + self.config.random_patch_prob,
        )
        source = torch.where(masked | kept, chosen, other)
        new = torch.where(masked[..., None], self.mask_token.to(patches.dtype), _gather_patches(patches, source))
        return patches.scatter(1, chosen[..., None].expand_as(new), new)

    @torch.no_grad()
    def color_targets(self, images: Tensor, grid: Grid) -> Tensor:
        """b C H W -> colors of each downsized patch, row by row, b N SS: class indices from 0 to Q - 1."""
        shown = self._covered(images) * self.std + self.mean  # in [0, 1]
        side = self.side
        small = F.adaptive_avg_pool2d(shown, (grid[0] * side, grid[1] * side))
        levels = (small * COLOR_LEVELS).floor().clamp(0, COLOR_LEVELS - 1).long()  # b C hS wS
        colors = levels[:, 0]
        for channel in range(1, levels.shape[1]):
            colors = colors * COLOR_LEVELS + levels[:, channel]
        colors = colors.unflatten(2, (-1, side)).unflatten(1, (-1, side))  # b h S w S
        return colors.transpose(2, 3).flatten(3).flatten(1, 2)

    @torch.no_grad()
    def pixel_targets(self, images: Tensor) -> Tensor:
        """b C H W -> b N Cpq, in the order of the patch projection."""
        height, width = pair(self.net.config.patch_size)  # type: ignore[union-attr]
        x = self._covered(images).unflatten(3, (-1, width)).unflatten(2, (-1, height))  # b C h p w q
        return x.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)

    def layer_id(self, name: str) -> int:
        return 0 if name == "mask_token" else super().layer_id(name)

    def _covered(self, images: Tensor) -> Tensor:
        assert isinstance(self.net, ViT)
        return self.net.crop_to_patches(images)


def _gather_patches(x: Tensor, index: Tensor) -> Tensor:
    """b N ..., b M -> b M ..."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[2]))


def _without_head(net: ViT) -> ViT:
    """The model without its head: DDP expects a gradient for every parameter."""
    if net.config.num_classes or net.config.pre_logits:
        net = net.with_classes(0)
    if net.pool is not None:
        net.pool.requires_grad_(False)
    return net


def _check_supported(net: ViT, config: MaskedPatchConfig) -> None:
    if net.config.stem is not None:
        raise ConfigError(
            "objective=masked-patch needs a plain ViT; the stem of a hybrid mixes patches before masking."
        )
    if config.target != "pixels" and net.config.channels > MAX_CHANNELS:
        raise ConfigError(
            f"got {net.config.channels} channels, expected at most {MAX_CHANNELS}: 3 bits per channel are too many "
            "colors; try masked_patch.target=pixels."
        )
    if config.target == "downsized" and min(pair(net.config.patch_size)) < DOWNSIZED_SIDE:
        raise ConfigError(
            f"masked_patch.target=downsized needs patches of at least {DOWNSIZED_SIDE} x {DOWNSIZED_SIDE} px, "
            f"got {net.config.patch_size}; try masked_patch.target=mean-color."
        )

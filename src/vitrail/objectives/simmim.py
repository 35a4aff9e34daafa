"""SimMIM (arXiv 2111.09886): masked image modeling that predicts the pixels of masked patches."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail import rng
from vitrail.config import PreprocessConfig, pair
from vitrail.config.train import SimMIMConfig
from vitrail.errors import ConfigError, ModelError
from vitrail.models import BiT, Net, Swin, ViT, init
from vitrail.models.drop import check_sample_seeds, random_sample_seeds
from vitrail.models.windows import Grid
from vitrail.objectives.base import Objective, Sums, at_least_float32, weighted_sums

# b images of C channels; T tokens of the last map, each of s x t pixels; D width there

MASK = rng.stream_id("SimMIM: patches to mask")


class SimMIMObjective(Objective):
    """Replace ceil(mask_ratio * cells) square cells of each image by a mask token, and predict their pixels.

    The embeddings of all patches in a masked cell are replaced, before positions are added. A linear layer predicts
    the normalized pixels of each token of the last map (stride 32 in a Swin Transformer, the patch in a ViT); the loss
    is the mean absolute error over the masked pixels. With `normalize_box`, the pixels of the target are normalized by
    the mean and variance of the box around them, as for Swin V2.

    Labels are not used. The head is removed (from a copy of the model).
    """

    def __init__(self, net: Net, config: SimMIMConfig, preprocess: PreprocessConfig, seed: int | None = None) -> None:
        if isinstance(net, BiT) or (isinstance(net, ViT) and net.config.stem is not None):
            kind = "a BiT has no patches" if isinstance(net, BiT) else "a hybrid's stem mixes patches before masking"
            raise ConfigError(f"objective=simmim needs a plain ViT or a Swin Transformer; {kind}.")
        patch = pair(net.config.patch_size)
        if any(config.mask_patch_size % side for side in patch):
            raise ConfigError(
                f"simmim.mask_patch_size={config.mask_patch_size} is not a multiple of the network's patch_size="
                f"{patch[0]}x{patch[1]}; try simmim.mask_patch_size={math.lcm(*patch)}."
            )
        super().__init__(_without_head(net))
        self.config, like = config, net.patch.weight
        self.stride = net.config.strides[-1] if isinstance(net, Swin) else patch
        outputs = net.config.channels * math.prod(self.stride)
        width = net.config.pooled_width if isinstance(net, Swin) else net.config.width
        self.mask_token = nn.Parameter(like.new_empty(net.config.width))
        self.decoder = nn.Linear(width, outputs, device=like.device, dtype=like.dtype)
        self.initialize(seed)

    @torch.no_grad()
    def initialize(self, seed: int | None = None) -> None:
        """Initialize the mask token with a standard deviation of 0.02, and the decoder as torch does a convolution."""
        g = init.generator_for(self.mask_token, seed)
        init.normal_(self.mask_token, 0.02, g)
        bound = 1 / math.sqrt(self.decoder.in_features)
        for parameter in (self.decoder.weight, self.decoder.bias):
            parameter.uniform_(-bound, bound, generator=g)

    def forward(self, images: Tensor, targets: Tensor, weights: Tensor, sample_seeds: Tensor | None = None) -> Sums:
        sample_seeds = random_sample_seeds(images) if sample_seeds is None else sample_seeds
        check_sample_seeds(sample_seeds, images)
        cells = self.masked_cells(images, sample_seeds)  # b rows columns
        predicted = at_least_float32(self.predict(images, cells, sample_seeds))  # b C H W
        expected = images.to(predicted.dtype)
        if self.config.normalize_box is not None:
            expected = normalize_in_boxes(expected, self.config.normalize_box)
        size = self.config.mask_patch_size
        masked = enlarge(cells, (size, size), (images.shape[2], images.shape[3]))[:, None].to(predicted.dtype)
        error = ((predicted - expected).abs().mean(1, keepdim=True) * masked).sum((1, 2, 3))
        return weighted_sums({"loss": error / masked.sum((1, 2, 3))}, weights)

    def masked_cells(self, images: Tensor, sample_seeds: Tensor) -> Tensor:
        """Which cells of `mask_patch_size` pixels are masked, b rows columns; drawn without replacement."""
        grid = [-(-side // self.config.mask_patch_size) for side in images.shape[2:]]
        count = math.ceil(self.config.mask_ratio * math.prod(grid))
        if math.prod(grid) < 2:
            raise ModelError(
                f"an image of {images.shape[2]}x{images.shape[3]} pixels has one cell of simmim.mask_patch_size="
                f"{self.config.mask_patch_size}; try a smaller one, or larger images."
            )
        chosen = rng.bits(sample_seeds, MASK, math.prod(grid)).argsort(1)[:, :count]
        mask = torch.zeros(len(images), math.prod(grid), dtype=torch.bool, device=images.device)
        return mask.scatter(1, chosen, True).unflatten(1, grid)

    def predict(self, images: Tensor, cells: Tensor, sample_seeds: Tensor | None = None) -> Tensor:
        """The predicted pixels of images whose masked cells (b rows columns) the network does not see, b C H W."""
        net = self.net
        assert isinstance(net, ViT | Swin)
        patch, size = pair(net.config.patch_size), self.config.mask_patch_size
        grid = net.config.grid_of((images.shape[2], images.shape[3]))
        masked = enlarge(cells, (size // patch[0], size // patch[1]), grid).flatten(1)[..., None]  # b T 1

        def corrupt(tokens: Tensor) -> Tensor:
            return torch.where(masked, self.mask_token.to(tokens.dtype), tokens)

        drawn = net.resolve_sample_seeds(images, sample_seeds)
        if isinstance(net, Swin):
            x, grid = net.encode(images, drawn, corrupt=corrupt)
        else:
            x, grid = net.embed(images, drawn, corrupt=corrupt)
            x = net.encode(x, grid, sample_seeds=drawn)[:, net.config.num_prefix_tokens :]
        x = self.decoder(net.norm(x)).unflatten(2, (net.config.channels, *self.stride)).unflatten(1, grid)
        x = x.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)  # b h w C s t -> b C hs wt
        return x[:, :, : images.shape[2], : images.shape[3]]

    def layer_id(self, name: str) -> int:
        return 0 if name == "mask_token" else super().layer_id(name)


def enlarge(cells: Tensor, factor: Grid, size: Grid) -> Tensor:
    """Repeat each cell of a grid, b rows columns, and crop to a size: b h w."""
    return cells.repeat_interleave(factor[0], 1).repeat_interleave(factor[1], 2)[:, : size[0], : size[1]]


@torch.no_grad()
def normalize_in_boxes(images: Tensor, box: int) -> Tensor:
    """Each pixel minus the mean of the box of box x box pixels around it, divided by its standard deviation."""
    pad = box // 2
    mean = F.avg_pool2d(images, box, stride=1, padding=pad, count_include_pad=False)
    square = F.avg_pool2d(images.square(), box, stride=1, padding=pad, count_include_pad=False)
    count = F.avg_pool2d(torch.ones_like(images), box, stride=1, padding=pad) * box**2
    variance = ((square - mean.square()) * count / (count - 1)).clamp(min=0)
    return (images - mean) / (variance + 1e-6).sqrt()


def _without_head(net: Net) -> Net:
    """The model without its head: DDP expects a gradient for every parameter."""
    if net.config.num_classes or (isinstance(net, ViT) and net.config.pre_logits):
        net = net.with_classes(0)
    if isinstance(net, ViT) and net.pool is not None:
        net.pool.requires_grad_(False)
    return net

"""A ViT that takes pixels: the normalization is part of its patch embedding, so that no pass over the images is left.

    W ((x / 255 - mean) / std) + b  =  W' (x - 128) + b'       W' = W / (255 std),  b' = b + W' (128 - 255 mean)

Pixels minus 128 are exact in bfloat16 and of the size of normalized values, so rounding is that of normalized images.
For 512 images of 224 px a GPU reads 77 MB of pixels instead of writing and reading 308 MB of float32 several times.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitrail.config import PreprocessConfig
from vitrail.errors import ModelError
from vitrail.models.vit import ViT

# B images of C channels, H x W pixels, K classes

CENTER = 128


class PixelInput(nn.Module):
    """Pixels, B H W C with values 0 to 255, usually uint8 -> the logits of `net` for normalized images, B K."""

    def __init__(self, net: ViT, preprocess: PreprocessConfig) -> None:
        super().__init__()
        self.net = fold_normalization(net, preprocess)

    def forward(self, pixels: Tensor) -> Tensor:
        images = pixels.permute(0, 3, 1, 2).to(self.net.patch.weight.dtype) - CENTER
        logits: Tensor = self.net(images)
        return logits


@torch.no_grad()
def fold_normalization(net: ViT, preprocess: PreprocessConfig) -> ViT:
    """A copy of a network for images of pixel values minus 128, B C H W, instead of normalized ones."""
    if net.stem is not None:
        raise ModelError(
            "the normalization cannot be folded into a hybrid's first convolution: its weights are scaled."
        )
    weight = net.patch.weight.double()
    mean, std = (torch.tensor(values, device=weight.device).double() for values in (preprocess.mean, preprocess.std))
    if len(mean) != weight.shape[1]:
        raise ModelError(f"got means of {len(mean)} channels, expected {weight.shape[1]}.")
    folded = weight / (255 * std[:, None, None])
    bias = (folded * (CENTER - 255 * mean)[:, None, None]).sum((1, 2, 3))
    if net.patch.bias is not None:
        bias += net.patch.bias
    dtype = net.patch.weight.dtype
    changed = {"patch.weight": folded.to(dtype), "patch.bias": bias.to(dtype)}
    return net.rebuild(net.config.replace(patch_bias=True), changed)

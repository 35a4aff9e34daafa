"""The stem of a hybrid ViT: a post-activation ResNet whose feature map is split into patches.

It follows the original ViT code; `StemConfig` can also select timm's convention, which computes slightly
different outputs from the same weights. BiT's ResNet is different: see `models.bit`.
"""

from __future__ import annotations

from functools import partial
from typing import Self

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitrail.config import Pair, StemConfig, pair
from vitrail.models import init, resnet
from vitrail.models.base import BaseNet
from vitrail.models.resnet import ROOT_KERNEL_SIZE, BottleneckShape, StandardizedConv, group_norm

# B images, C channels, h rows and w columns of a feature map


class ConvNorm(nn.Module):
    """A standardized convolution and a GroupNorm."""

    def __init__(self, config: StemConfig, in_channels: int, out_channels: int, kernel_size: int, stride: int) -> None:
        super().__init__()
        self.conv = _conv(config, in_channels, out_channels, kernel_size, stride)
        self.norm = group_norm(out_channels, config.norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.conv(x))
        return y


class Bottleneck(nn.Module):
    """Convolution, norm, ReLU, three times; the shortcut is added before the last ReLU."""

    def __init__(self, config: StemConfig, unit: BottleneckShape) -> None:
        super().__init__()
        conv, norm = partial(_conv, config), partial(group_norm, eps=config.norm_eps)
        self.project = (
            ConvNorm(config, unit.in_channels, unit.out_channels, 1, unit.stride) if unit.has_projection else None
        )
        self.conv1 = conv(unit.in_channels, unit.mid_channels, 1)
        self.norm1 = norm(unit.mid_channels)
        self.conv2 = conv(unit.mid_channels, unit.mid_channels, 3, unit.stride)
        self.norm2 = norm(unit.mid_channels)
        self.conv3 = conv(unit.mid_channels, unit.out_channels, 1)
        self.norm3 = norm(unit.out_channels)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.project is None else self.project(x)
        x = F.relu(self.norm1(self.conv1(x)), inplace=True)
        x = F.relu(self.norm2(self.conv2(x)), inplace=True)
        return F.relu(shortcut + self.norm3(self.conv3(x)), inplace=True)


class ResNetStem(BaseNet):
    """`stem(images)`: B C H W -> B C' h w, with `config.channels` channels and `config.stride` times smaller.

    Sides that are not multiples of the stride are rounded up. With layers=() there is only the root.
    """

    def __init__(self, config: StemConfig, channels: int = 3) -> None:
        super().__init__()
        self.config = config
        base = _base_channels(config)
        self.root = ConvNorm(config, channels, base, ROOT_KERNEL_SIZE, 2)
        self.stages = nn.ModuleList(
            nn.ModuleList(Bottleneck(config, unit) for unit in stage)
            for stage in resnet.plan_stages(config.layers, base)
        )
        if not init.is_meta(self):
            self.initialize()

    def forward(self, images: Tensor) -> Tensor:
        recompute = self.is_checkpointing()
        x = resnet.max_pool_same(F.relu(self.root(images), inplace=True))
        for stage in self.stages:
            assert isinstance(stage, nn.ModuleList)
            for unit in stage:
                x = checkpoint(unit, x, use_reentrant=False, preserve_rng_state=False) if recompute else unit(x)
        return x

    @torch.no_grad()
    def initialize(self, generator: Generator | None = None) -> Self:
        """Initialize as the original code does: norm3 is zero, so each block starts as its shortcut."""
        resnet.initialize(self, generator)
        for module in self.modules():
            if isinstance(module, Bottleneck):
                nn.init.zeros_(module.norm3.weight)
        return self


def count_flops(config: StemConfig, image_size: Pair, channels: int = 3) -> int:
    """FLOPs of the convolutions for one image of this size."""
    return resnet.convolution_flops(config.layers, _base_channels(config), channels, pair(image_size))


def _base_channels(config: StemConfig) -> int:
    return int(64 * config.width_factor)


def _conv(
    config: StemConfig, in_channels: int, out_channels: int, kernel_size: int, stride: int = 1
) -> StandardizedConv:
    return StandardizedConv(
        in_channels, out_channels, kernel_size, stride, same=True, by=config.standardize, eps=config.standardize_eps
    )

"""BiT (Big Transfer, arXiv 1912.11370): the ResNet that the ViT paper compares with.

Pre-activation blocks, symmetric padding, a norm before the pool and the head. The ResNet of a hybrid's
stem is different: see `models.hybrid`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from vitrail.config import BiTConfig, Pair, pair
from vitrail.errors import ModelError, did_you_mean
from vitrail.models import init, resnet
from vitrail.models.base import BaseNet
from vitrail.models.output import PER_LAYER, Output, resolve_layers, resolve_outputs
from vitrail.models.resnet import ROOT_KERNEL_SIZE, BottleneckShape, StandardizedConv, group_norm

# B images, C channels, h rows and w columns of a feature map


class PreActBottleneck(nn.Module):
    """Norm, ReLU, convolution, three times; a projection shortcut starts after the first ReLU."""

    def __init__(self, config: BiTConfig, unit: BottleneckShape) -> None:
        super().__init__()
        conv, norm = partial(_conv, config), partial(group_norm, eps=config.norm_eps)
        self.norm1 = norm(unit.in_channels)
        self.project = conv(unit.in_channels, unit.out_channels, 1, unit.stride) if unit.has_projection else None
        self.conv1 = conv(unit.in_channels, unit.mid_channels, 1)
        self.norm2 = norm(unit.mid_channels)
        self.conv2 = conv(unit.mid_channels, unit.mid_channels, 3, unit.stride)
        self.norm3 = norm(unit.mid_channels)
        self.conv3 = conv(unit.mid_channels, unit.out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = F.relu(self.norm1(x), inplace=True)
        shortcut = x if self.project is None else self.project(y)
        y = self.conv2(F.relu(self.norm2(self.conv1(y)), inplace=True))
        y = self.conv3(F.relu(self.norm3(y), inplace=True))
        return shortcut + y


class BiT(BaseNet):
    """BiT ResNet. `net(images)`: B C H W -> logits; `net.features(images, outputs=...)`: intermediates by name.

    Any height and width will do. Nothing in it is drawn: `sample_seeds` are taken, as a ViT does, and not used.
    """

    first_kernel = "root.weight"

    def __init__(self, config: BiTConfig, seed: int | None = None) -> None:
        super().__init__()
        self.config: BiTConfig = config
        base = _base_channels(config)
        self.root = _conv(config, config.channels, base, ROOT_KERNEL_SIZE, 2)
        self.stages = nn.ModuleList(
            nn.ModuleList(PreActBottleneck(config, unit) for unit in stage)
            for stage in resnet.plan_stages(config.layers, base)
        )
        self.norm = group_norm(_out_channels(config), config.norm_eps)
        self.head = nn.Linear(_out_channels(config), config.num_classes) if config.num_classes else nn.Identity()
        if not init.is_meta(self):
            self.initialize(seed)

    def forward(self, images: Tensor, sample_seeds: Tensor | None = None) -> Tensor:
        logits: Tensor = self.head(self.final_norm(self.encode(images)).mean((2, 3)))
        return logits

    def features(
        self,
        images: Tensor,
        outputs: str | Iterable[str] | None = None,
        sample_seeds: Tensor | None = None,
        *,
        layers: Iterable[int] | None = None,
        norm: bool = False,
    ) -> Output:
        """Intermediate outputs: logits, pooled (equal to pre_logits), feature_maps, and the final map as patches.

        `layers` keeps the maps (or patch_maps, B h w C) of these stages alone, counted from 0, negative ones from the
        end; stages after the last of them are not computed unless another output needs them.
        """
        names = resolve_outputs(outputs, layers, default_layered="feature_maps")
        _check_outputs(names)
        if norm:
            raise ModelError("BiT's final norm fits its last stage alone, not each; 'patches' is that map normalized.")
        numbers = resolve_layers(layers, len(self.stages))
        kept = dict.fromkeys(numbers, images) if names & PER_LAYER else {}
        x = self.encode(images, kept, max(numbers) + 1 if names <= PER_LAYER else None)
        found: dict[str, Any] = {}
        if kept:
            found["feature_maps"] = tuple(kept[number] for number in numbers)
            found["patch_maps"] = tuple(m.permute(0, 2, 3, 1) for m in found["feature_maps"])
        if names <= PER_LAYER:
            return Output(**{name: found[name] for name in names})
        x = self.final_norm(x)
        pooled = x.mean((2, 3))  # B C
        found |= {
            "pooled": pooled,
            "pre_logits": pooled,
            "patches": x.permute(0, 2, 3, 1),  # B h w C
        }
        if "logits" in names:
            found["logits"] = self.head(pooled)
        return Output(**{name: found[name] for name in names})

    def encode(self, images: Tensor, maps: dict[int, Tensor] | None = None, stop: int | None = None) -> Tensor:
        """Run all stages, or the first `stop`: B C h w. Outputs of the stages in `maps` are stored there."""
        self.check_images(images)
        recompute = self.is_checkpointing()
        x = root_pool(self.root(images), self.config.root_pad)
        for i, stage in enumerate(self.stages):
            if i == stop:
                break
            assert isinstance(stage, nn.ModuleList)
            for unit in stage:
                x = checkpoint(unit, x, use_reentrant=False, preserve_rng_state=False) if recompute else unit(x)
            if maps is not None and i in maps:
                maps[i] = x
        return x

    def final_norm(self, x: Tensor) -> Tensor:
        """Final norm and ReLU, B C h w."""
        return F.relu(self.norm(x), inplace=True)

    @torch.no_grad()
    def initialize(self, seed: int | None = None) -> Self:
        """Initialize the weights as the original code does; the same seed gives the same weights."""
        resnet.initialize(self, init.generator_for(self.root.weight, seed))
        if isinstance(self.head, nn.Linear):
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)
        return self

    def resized(self, image_size: Pair) -> BiT:
        """A copy for images of this size; the weights do not depend on it."""
        return self.rebuild(self.config.replace(image_size=image_size), {})

    def with_classes(self, num_classes: int) -> BiT:
        """A copy with a new head initialized to zero, for fine-tuning."""
        config, like = self.config.replace(num_classes=num_classes), self.norm.weight
        head = {
            "head.weight": like.new_zeros(num_classes, _out_channels(config)),
            "head.bias": like.new_zeros(num_classes),
        }
        return self.rebuild(config, head if num_classes else {}, drop=("head.",))

    def layer_id(self, name: str) -> int:
        """0 for the root; the blocks of all stages from 1; one more for the final norm and the head."""
        part, _, rest = name.partition(".")
        if not hasattr(self, part):
            raise ModelError(f"unknown parameter {name!r}{did_you_mean(name, dict(self.named_parameters()))}")
        if part == "stages":
            stage, unit = map(int, rest.split(".")[:2])
            return sum(self.config.layers[:stage]) + unit + 1
        return sum(self.config.layers) + 1 if part in ("norm", "head") else 0


def count_flops(config: BiTConfig, image_size: Pair | None = None) -> int:
    """FLOPs of convolutions and head for one image; None: of the config's image size."""
    size = pair(config.image_size if image_size is None else image_size)
    convolutions = resnet.convolution_flops(config.layers, _base_channels(config), config.channels, size)
    return convolutions + 2 * _out_channels(config) * config.num_classes


@fx.wrap
def root_pool(x: Tensor, pad: str) -> Tensor:
    """3x3 max-pool, stride 2, zero padding that takes part in the maximum.

    pad="none": padding does not take part, as in big_vision. The zeros are applied afterwards to the windows
    that cross the edge: cheaper than a padded copy, and ONNX Runtime would merge an explicit padding
    into the pool and drop the zeros.
    """
    pooled = F.max_pool2d(x, 3, 2, padding=1)
    if pad == "none":
        return pooled
    rows, columns = (_crosses_edge(side, x.device) for side in x.shape[-2:])
    return torch.where(rows[:, None] | columns, F.relu(pooled), pooled)


def _crosses_edge(side: int, device: torch.device) -> Tensor:
    """Which windows along a side cross its edges."""
    starts = torch.arange(-1, side - 1, 2, device=device)
    return (starts < 0) | (starts + 2 >= side)


def _base_channels(config: BiTConfig) -> int:
    return int(64 * config.width_factor)


def _out_channels(config: BiTConfig) -> int:
    """Channels of the last feature map, the input of the head."""
    return resnet.plan_stages(config.layers, _base_channels(config))[-1][-1].out_channels


def _conv(
    config: BiTConfig, in_channels: int, out_channels: int, kernel_size: int, stride: int = 1
) -> StandardizedConv:
    return StandardizedConv(
        in_channels, out_channels, kernel_size, stride, same=False, by="var", eps=config.standardize_eps
    )


_UNAVAILABLE = {
    "attention": "BiT has no attention",
    "tokens": "BiT has no tokens; 'feature_maps' are the outputs of its stages",
    "prefix_tokens": "BiT has no tokens; 'feature_maps' are the outputs of its stages",
    "class_token": "BiT has no class token; 'pooled' is the input of its head",
    "pool_attention": "BiT pools by the mean, not by attention",
    "head_logits": "BiT is not distilled: there is one head",
}


def _check_outputs(names: frozenset[str]) -> None:
    for name in names:
        if name in _UNAVAILABLE:
            raise ModelError(f"this network cannot give {name!r}: {_UNAVAILABLE[name]}.")

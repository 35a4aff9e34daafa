"""What the hybrid's stem and BiT share: standardized convolutions, SAME padding, the shape of the network.

Both are bottleneck ResNets: a 7x7 convolution and a pool that shrink the image four times, then
stages of units, each stage after the first halving the map and doubling the channels. They differ
in where the norms stand, in the padding and in how kernels are standardized.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from vitrail.errors import ConfigError
from vitrail.models import init
from vitrail.models.cached_module import CachedModule

# B images, I and O channels in and out, k side of a kernel, h rows and w columns of a map

NUM_GROUPS = 32
"""Groups of every GroupNorm."""
ROOT_KERNEL_SIZE = 7
"""Side of the first kernel."""

Standardization = Literal["std", "var"]


@fx.wrap
def standardize(kernel: Tensor, by: Standardization, eps: float) -> Tensor:
    """Mean 0 and spread 1 for each output channel, O I k k.

    Divided by sqrt(var + eps) ("var") or by std + eps ("std"); in float32 at least, since eps may
    be below what half precision can tell from 0. Layer norm is the fastest way to the first: on a
    CPU core 29 ms for all kernels of BiT-R50x1, against 46 for batch norm and 185 for `var_mean`.
    """
    rows = kernel.flatten(1)
    rows = rows if rows.dtype == torch.float64 else rows.float()
    size = rows.shape[1]
    if by == "var":
        rows = F.layer_norm(rows, (size,), eps=eps)
    else:
        rows = rows - rows.mean(1, keepdim=True)
        # the norm, unlike the root of a variance, has a gradient where all values are equal
        rows = rows / (torch.linalg.vector_norm(rows, dim=1, keepdim=True) / math.sqrt(size) + eps)
    return rows.to(kernel.dtype).view(kernel.shape)


def same_padding(size: int, kernel: int, stride: int) -> tuple[int, int]:
    """Zeros before and after a side so that ceil(size / stride) windows cover it, as TensorFlow counts.

    The odd one goes after: a stride of 2 pads an even side unevenly and an odd one evenly.
    """
    total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    return total // 2, total - total // 2


@fx.wrap
def max_pool_same(x: Tensor) -> Tensor:
    """3x3 windows, stride 2, SAME padding; what lies outside never wins.

    `ceil_mode` adds the last, incomplete window without a padded copy of the map.
    """
    rows, columns = (same_padding(side, 3, 2)[0] for side in x.shape[-2:])
    return F.max_pool2d(x, 3, 2, padding=(rows, columns), ceil_mode=True)


@fx.wrap
def conv_same(x: Tensor, kernel: Tensor, stride: int) -> Tensor:
    """A convolution with SAME padding."""
    side = kernel.shape[-1]
    rows, columns = (same_padding(n, side, stride) for n in x.shape[-2:])
    padding = (rows[0], columns[0])
    if rows[0] != rows[1] or columns[0] != columns[1]:
        x, padding = F.pad(x, (*columns, *rows)), (0, 0)
    return F.conv2d(x, kernel, stride=stride, padding=padding)


class StandardizedConv(CachedModule):
    """A convolution without bias whose kernel is standardized before use.

    In evaluation without gradients the standardized kernel is kept from call to call, a second copy
    of the weights in memory; see `CachedModule`.
    """

    def __init__(
        self, inputs: int, outputs: int, side: int, stride: int = 1, *, same: bool, by: Standardization, eps: float
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, side, side))
        self.stride, self.padding, self.same, self.by, self.eps = stride, side // 2, same, by, eps

    def forward(self, x: Tensor) -> Tensor:
        """B I H W -> B O h w."""
        if self.same:
            return conv_same(x, self.kernel(), self.stride)
        return F.conv2d(x, self.kernel(), stride=self.stride, padding=self.padding)

    def kernel(self) -> Tensor:
        """The standardized weight, O I k k."""
        kernel: Tensor = self.cached(None, self.weight.device, lambda: standardize(self.weight, self.by, self.eps))
        return kernel

    def extra_repr(self) -> str:
        outputs, inputs, side, _ = self.weight.shape
        return f"{inputs}, {outputs}, {side}x{side}, stride={self.stride}, {'SAME' if self.same else 'symmetric'}"


def group_norm(channels: int, eps: float) -> nn.GroupNorm:
    if channels % NUM_GROUPS:
        raise ConfigError(
            f"{NUM_GROUPS} groups do not divide {channels} channels; try a width_factor that is a multiple of "
            f"{NUM_GROUPS / 64}."
        )
    return nn.GroupNorm(NUM_GROUPS, channels, eps=eps)


@torch.no_grad()
def initialize(net: nn.Module, generator: torch.Generator | None) -> None:
    """Kernels lecun normal, norms 1 and 0: what the two networks have in common at birth."""
    for module in net.modules():
        if isinstance(module, StandardizedConv):
            init.lecun_normal_(module.weight, generator)
        elif isinstance(module, nn.GroupNorm):
            module.reset_parameters()


@dataclass(frozen=True)
class BottleneckShape:
    """The shape of one bottleneck: 1x1 down to `middle`, 3x3 with the stride, 1x1 up to 4 * `middle`."""

    inputs: int
    middle: int
    stride: int

    @property
    def outputs(self) -> int:
        return 4 * self.middle

    @property
    def projects(self) -> bool:
        """The shortcut needs a convolution of its own where the shape changes."""
        return self.inputs != self.outputs or self.stride != 1


def plan_stages(layers: tuple[int, ...], base: int) -> list[list[BottleneckShape]]:
    """The units of each stage; `base` channels come from the root."""
    stages, channels = [], base
    for s, count in enumerate(layers):
        middle, stage = base * 2**s, []
        for u in range(count):
            stage.append(BottleneckShape(channels, middle, 2 if s and not u else 1))
            channels = 4 * middle
        stages.append(stage)
    return stages


def convolution_flops(layers: tuple[int, ...], base: int, channels: int, image_size: tuple[int, int]) -> int:
    """2 x multiply-adds of all convolutions for one image; norms, pools and sums are not counted."""
    height, width = (-(-side // 2) for side in image_size)
    total = channels * base * ROOT_KERNEL_SIZE**2 * height * width
    height, width = -(-height // 2), -(-width // 2)
    for stage in plan_stages(layers, base):
        for unit in stage:
            total += unit.inputs * unit.middle * height * width
            height, width = -(-height // unit.stride), -(-width // unit.stride)
            per_pixel = 9 * unit.middle**2 + unit.middle * unit.outputs
            per_pixel += unit.inputs * unit.outputs if unit.projects else 0
            total += per_pixel * height * width
    return 2 * total

"""A network as it is exported: with its preprocessing inside, or bare."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.export.extras import quiet
from vitrail.export.sheet import Sheet
from vitrail.models import Net
from vitrail.models.resnet import StandardizedConv

# B pictures, H x W pixels, C channels

MOST = 65536
"""Pictures at a time, where any number will do."""


class Packaged(nn.Module):
    """Pixels 0 to 255, B H W C, or normalised images, B C H W -> logits, probabilities or features.

    Resizing and cropping stay outside: they depend on the picture.
    """

    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(self, net: Net, sheet: Sheet, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.net = settled(copy.deepcopy(net).to("cpu").eval().requires_grad_(False)).to(dtype)
        self.dtype, self.inside, self.answer = dtype, sheet.inside, sheet.answer
        self.several = sheet.card.several
        for name in ("mean", "std"):
            values = torch.tensor(getattr(sheet.card.preprocess, name), dtype=torch.float32)
            self.register_buffer(f"pixel_{name}", values[:, None, None])  # `mean` is an operator's name, too

    def forward(self, pixels: Tensor) -> Tensor:
        images = pixels
        if self.inside:
            images = (pixels.permute(0, 3, 1, 2).to(torch.float32) / 255 - self.pixel_mean) / self.pixel_std
        out: Tensor = self.net(images.to(self.dtype)).to(torch.float32)
        if self.answer != "probabilities":
            return out
        return out.sigmoid() if self.several else out.softmax(-1)


class SettledConv(StandardizedConv):
    """A convolution whose kernel has been standardised once and for all."""

    def kernel(self) -> Tensor:
        return self.weight


@torch.no_grad()
def settled(net: Net) -> Net:
    """The same network, its kernels standardised now instead of each time."""
    for module in net.modules():
        if isinstance(module, StandardizedConv):
            module.weight.copy_(module.kernel().clone())
            module.__class__ = SettledConv
    return net


def traced(net: Net, sheet: Sheet) -> torch.export.ExportedProgram:
    """The whole as one graph, for the sheet's batch."""
    dtype = torch.bfloat16 if (sheet.to, sheet.precision) == ("pt2", "bfloat16") else torch.float32
    module = Packaged(net, sheet, dtype).eval()
    shapes: Any = None
    if sheet.batch is None:
        shapes = ({0: torch.export.Dim("batch", min=1, max=MOST)},)
    with quiet(), torch.no_grad():
        return torch.export.export(module, (torch.from_numpy(blank(sheet)),), dynamic_shapes=shapes)


def blank(sheet: Sheet, count: int | None = None) -> np.ndarray[Any, Any]:
    """Black pictures of the shape and type that go in; two where any number may."""
    kind = np.uint8 if sheet.bytes_in else np.float32
    return np.zeros((count or sheet.batch or 2, *sheet.shape), kind)

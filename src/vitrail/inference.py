"""Images -> outputs of a network: the one path of predict, embed, explain, serve and the torch engine."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vitrail.data.preprocess import Preprocess
from vitrail.models import Net
from vitrail.models.base import eval_mode

# B images, H x W pixels, C channels

Pixels = npt.NDArray[Any]
OutputName = Literal["logits", "pooled"]


def network_input(net: Net, preprocess: Preprocess, pixels: Pixels) -> Tensor:
    """B H W C, 0 to 255 -> B C H W, normalized, on the device and in the dtype of the network."""
    like = next(net.parameters())
    batch = torch.from_numpy(np.ascontiguousarray(pixels)).to(like.device).permute(0, 3, 1, 2)
    return preprocess.normalize(batch).to(like.dtype)


@torch.no_grad()  # not inference_mode, whose outputs cannot be used in training
def run_network(net: Net, preprocess: Preprocess, pixels: Pixels, output: OutputName = "logits") -> Tensor:
    """B H W C, 0 to 255 -> the logits, B K, or the pooled features before the head, B D, on the CPU."""
    images = network_input(net, preprocess, pixels)
    with eval_mode(net):
        result = net(images) if output == "logits" else net.features(images, outputs=(output,)).pooled
    assert isinstance(result, Tensor)
    return to_cpu(result)


def to_cpu(x: Tensor) -> Tensor:
    """Move to the CPU, in float32 or higher precision."""
    return x.to("cpu", torch.promote_types(x.dtype, torch.float32))

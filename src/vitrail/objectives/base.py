"""What every objective is: the network and a loss, in one module.

The module is what is compiled, spread over devices, averaged and checkpointed. It returns sums, not
means, so that parts of a batch, and the parts of other processes, add up to the same numbers.
"""

from __future__ import annotations

from torch import Tensor, nn

from vitrail.models import Net

# B images, C channels, H W pixels, K classes


class Objective(nn.Module):
    """`objective(images, targets, weights, keys)` -> named sums over the images, each times its weight.

    "loss" is always there; "correct" where an answer is right or wrong.
    """

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor, targets: Tensor, weights: Tensor, keys: Tensor) -> dict[str, Tensor]:
        raise NotImplementedError

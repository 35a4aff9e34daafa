"""What every network here shares: copies with another config, other channels, checks of its input."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Self, get_type_hints

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from vitrail.errors import ModelError
from vitrail.models.layers import PatchEmbed
from vitrail.models.resnet import StandardizedConv

_LOCK = threading.Lock()
_IN_EVAL_MODE: dict[nn.Module, tuple[int, list[nn.Module]]] = {}
"""Networks inside `eval_mode`: how many callers each has, and those of its parts that were in training mode."""

DECAYED_MODULES = (nn.Linear, PatchEmbed, StandardizedConv)
"""What holds a kernel: a matrix or a convolution."""


class BaseNet(nn.Module):
    """Built from `config` alone; its state_dict is all it knows."""

    config: Any
    first_kernel: str
    """Name of the parameter that sees the image's channels."""

    def __init_subclass__(cls) -> None:
        """With types, not strings, in the annotations of forward: a graph traced by torch.fx holds and pickles them."""
        super().__init_subclass__()
        with suppress(NameError):  # a type imported for the type checker alone
            cls.forward.__annotations__ = get_type_hints(cls.forward)

    def __init__(self) -> None:
        super().__init__()
        self._recompute = False

    @property
    def gradient_checkpointing(self) -> bool:
        """Set to True to recompute each block in the backward pass of training mode, and keep less."""
        return self._recompute

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, on: bool) -> None:
        for module in self.modules():
            if isinstance(module, BaseNet):
                module._recompute = on

    @torch.no_grad()
    def with_channels(self, channels: int) -> Self:
        """A copy for images of other channels: the first filters summed for one, repeated for more.

        A ViT answers to a gray image as before. Behind a ResNet's standardized first convolution,
        which rescales every filter, the copy is only a place to start from.
        """
        weight = adapt_channels(self.state_dict()[self.first_kernel], channels)
        return self.rebuild(self.config.replace(channels=channels), {self.first_kernel: weight})

    def rebuild(self, config: Any, changed: dict[str, Tensor], drop: tuple[str, ...] = ()) -> Self:
        """A copy of another config, with some parameters changed and those of some prefixes left out."""
        with torch.device("meta"):
            net = type(self)(config)  # type: ignore[call-arg]
        kept = {k: v for k, v in self.state_dict().items() if not drop or not k.startswith(drop)}
        state = {k: v.detach().clone() for k, v in (kept | changed).items()}
        net.load_state_dict(state, assign=True)
        net.gradient_checkpointing = self.gradient_checkpointing
        return net.train(self.training)

    def decayed_parameters(self) -> set[str]:
        """Names of the parameters that weight decay is meant for: kernels, and nothing else.

        No biases, norms or LayerScale, no tokens and registers, no positions, not the pool's probe.
        """
        return {f"{name}.weight" for name, module in self.named_modules() if isinstance(module, DECAYED_MODULES)}

    def layer_id(self, name: str) -> int:
        """How high a parameter stands: 0 for what sees the image first, and the head on top."""
        raise NotImplementedError

    def is_checkpointing(self) -> bool:
        return self._recompute and self.training and torch.is_grad_enabled()

    def check_images(self, images: Tensor) -> None:
        if isinstance(images, Proxy):  # torch.fx records the graph: there is no shape to check
            return
        channels = self.config.channels
        if images.ndim != 4 or images.shape[1] != channels:
            raise ModelError(f"wanted images as B {channels} H W, got {tuple(images.shape)}.")
        if not images.is_floating_point():
            raise ModelError(f"wanted normalized float images, got {images.dtype}; preprocess them first.")


def adapt_channels(weight: Tensor, channels: int) -> Tensor:
    """D C p q -> D channels p q. One channel: the filters' sum. More: in turn, scaled to keep the sum."""
    had = weight.shape[1]
    if channels == had:
        return weight
    if channels < 1:
        raise ModelError(f"an image has at least one channel, got channels={channels}.")
    if channels == 1:
        return weight.sum(1, keepdim=True)
    times = -(-channels // had)
    return weight.repeat(1, times, 1, 1)[:, :channels] * (had / channels)


@contextmanager
def eval_mode(net: nn.Module) -> Iterator[None]:
    """In evaluation mode; afterwards every part is in the mode it was in.

    A network that is in evaluation mode is left alone. Threads may share a network: the last of them to
    leave restores the modes.
    """
    with _LOCK:
        users, before = _IN_EVAL_MODE.get(net, (0, []))
        training = [module for module in net.modules() if module.training]
        if training:
            net.eval()
        _IN_EVAL_MODE[net] = users + 1, before + training
    try:
        yield
    finally:
        with _LOCK:
            users, training = _IN_EVAL_MODE.pop(net)
            if users > 1:
                _IN_EVAL_MODE[net] = users - 1, training
            else:
                for module in training:
                    module.training = True

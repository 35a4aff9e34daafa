"""BaseNet: what ViT and BiT share. Copies with another config, other channels, checks of the input."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Self, get_type_hints

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from vitrail.errors import ModelError
from vitrail.kernels.eight_bit import EIGHT_BIT, is_eight_bit
from vitrail.models.layers import PatchEmbed
from vitrail.models.resnet import StandardizedConv

_LOCK = threading.Lock()
_IN_EVAL_MODE: dict[nn.Module, tuple[int, list[nn.Module]]] = {}
"""Models inside `eval_mode` -> number of callers, and the modules that were in training mode."""

DECAYED_MODULES = (nn.Linear, PatchEmbed, StandardizedConv)
"""Layers whose weight gets weight decay: matrices and convolutions."""


class BaseNet(nn.Module):
    """Base class of the models: defined by its `config` and its state_dict; no buffers."""

    config: Any
    first_kernel: str
    """Name of the parameter whose input dimension is the image's channels."""

    def __init_subclass__(cls) -> None:
        """Resolve the annotations of `forward` to types: a graph traced by torch.fx stores and pickles them."""
        super().__init_subclass__()
        with suppress(NameError):  # a type imported for the type checker alone
            cls.forward.__annotations__ = get_type_hints(cls.forward)

    def __init__(self) -> None:
        super().__init__()
        self._recompute = False

    @property
    def gradient_checkpointing(self) -> bool:
        """Recompute each block in the backward pass instead of storing its activations (training mode only)."""
        return self._recompute

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, on: bool) -> None:
        for module in self.modules():
            if isinstance(module, BaseNet):
                module._recompute = on

    @torch.no_grad()
    def with_channels(self, channels: int) -> Self:
        """A copy for another number of channels: the first filters are summed for one, repeated for more.

        A ViT's outputs for gray images are unchanged. A ResNet's standardized first convolution rescales
        every filter, so there the copy is only an initialization.
        """
        weight = adapt_channels(self.state_dict()[self.first_kernel], channels)
        return self.rebuild(self.config.replace(channels=channels), {self.first_kernel: weight})

    def rebuild(self, config: Any, changed: dict[str, Tensor], drop: tuple[str, ...] = ()) -> Self:
        """A copy with another config: `changed` replaces parameters, those with a prefix in `drop` are removed."""
        if is_eight_bit(self):
            raise ModelError(f"a network in {EIGHT_BIT} cannot be changed; load it with the size it needs.")
        with torch.device("meta"):
            net = type(self)(config)  # type: ignore[call-arg]
        state = {k: v for k, v in self.state_dict().items() if not drop or not k.startswith(drop)}
        state = {k: v.detach().clone() for k, v in (state | changed).items()}
        net.load_state_dict(state, assign=True)
        net.gradient_checkpointing = self.gradient_checkpointing
        return net.train(self.training)

    def decayed_parameters(self) -> set[str]:
        """Names of the parameters with weight decay: weights of matrices and convolutions.

        Without biases, norms, LayerScale, tokens, registers, positions and the pool's query.
        """
        return {f"{name}.weight" for name, module in self.named_modules() if isinstance(module, DECAYED_MODULES)}

    def layer_id(self, name: str) -> int:
        """Index of a parameter's layer for layer-wise learning rate decay: 0 at the input, the highest for the head."""
        raise NotImplementedError

    def is_checkpointing(self) -> bool:
        return self._recompute and self.training and torch.is_grad_enabled()

    def check_images(self, images: Tensor) -> None:
        if isinstance(images, Proxy):  # torch.fx records the graph: there is no shape to check
            return
        channels = self.config.channels
        if images.ndim != 4 or images.shape[1] != channels:
            raise ModelError(f"expected images as B {channels} H W, got {tuple(images.shape)}.")
        if not images.is_floating_point():
            raise ModelError(f"expected normalized float images, got {images.dtype}; preprocess them first.")


def adapt_channels(weight: Tensor, channels: int) -> Tensor:
    """D C p q -> D channels p q. For one channel the filters' sum; for more, repeated and scaled to keep the sum."""
    in_channels = weight.shape[1]
    if channels == in_channels:
        return weight
    if channels < 1:
        raise ModelError(f"an image has at least one channel, got channels={channels}.")
    if channels == 1:
        return weight.sum(1, keepdim=True)
    times = -(-channels // in_channels)
    return weight.repeat(1, times, 1, 1)[:, :channels] * (in_channels / channels)


@contextmanager
def eval_mode(net: nn.Module) -> Iterator[None]:
    """Context manager: put a model in evaluation mode, and restore every module's mode afterwards.

    A model already in evaluation mode is not touched. Threads may share a model: the last one to
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

"""A cache for values that evaluation would compute again from unchanged weights in every forward pass."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.fx import Proxy


class CacheEntry(NamedTuple):
    """A cached value and the state of everything it was computed from."""

    key: Hashable
    weights: tuple[Tensor, ...]
    aliases: tuple[Tensor, ...]  # keep the storages alive, so that their addresses are not reused
    versions: tuple[int, ...]
    stream: int
    value: Any

    def is_valid_for(self, key: Hashable, weights: tuple[Tensor, ...], stream: int) -> bool:
        return (
            self.key == key
            and self.stream == stream
            and len(self.weights) == len(weights)
            and all(a is b for a, b in zip(self.weights, weights, strict=True))
            and self.versions == tuple(w._version for w in weights)
            and all(a.is_set_to(w) for a, w in zip(self.aliases, weights, strict=True))
        )


class CachedModule(nn.Module):
    """A module that caches its last value in evaluation mode without gradients.

    The value is recomputed when a weight changes, moves or is replaced, when gradients are enabled, and
    after `train()` or `eval()`. It is not cached while a graph is traced or captured, nor shared between
    CUDA streams. Writes to `weight.data` or a NumPy view are not detected; call `eval()` after them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._cache: CacheEntry | None = None

    def cached(self, key: Hashable, device: torch.device, make: Callable[[], Any]) -> Any:
        """`make()`, or its last value for the same key and unchanged parameters."""
        if torch.compiler.is_compiling() or isinstance(device, Proxy):
            return make()
        weights = tuple(self.parameters())
        # Cached modules have no buffers of their own: a buffer is a mask of torch.nn.utils.prune.
        if self.training or self._buffers or not _is_cacheable(weights, device):
            self._cache = None
            return make()
        key, stream = (key, device, torch.is_inference_mode_enabled()), _cuda_stream(device)
        entry = self._cache  # another thread may replace it
        if entry is None or not entry.is_valid_for(key, weights, stream):
            value = make()
            parts = value if isinstance(value, tuple) else (value,)
            if any(type(part) is not Tensor for part in parts):  # a tracer's proxy
                return value
            aliases, versions = tuple(w.detach() for w in weights), tuple(w._version for w in weights)
            entry = CacheEntry(key, weights, aliases, versions, stream, value)
            self._cache = entry
        return entry.value

    def train(self, mode: bool = True) -> Self:
        self._cache = None
        return super().train(mode)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        self._cache = None  # frees memory on the device that the weights leave
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_cache": None}


def _is_cacheable(weights: tuple[Tensor, ...], device: torch.device) -> bool:
    """Whether a value of these weights may be cached: plain parameters, no gradients, no CUDA graph capture."""
    if weights and torch.is_grad_enabled():
        return False
    if any(type(w) is not nn.Parameter or w.is_inference() for w in weights):
        return False
    return not (device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def _cuda_stream(device: torch.device) -> int:
    """The current CUDA stream: on another stream the value may not be computed yet."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0

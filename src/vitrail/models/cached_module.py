"""Keeping what evaluation would compute again and again from weights that do not change."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.fx import Proxy


class CacheEntry(NamedTuple):
    """A result, and the state of everything it was made from."""

    key: Hashable
    weights: tuple[Tensor, ...]
    aliases: tuple[Tensor, ...]  # hold the storages, so that their addresses cannot come back with other values
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
    """A module that keeps its last result in evaluation without gradients.

    It is made anew when a weight changes, moves or is replaced, when gradients are wanted, and after
    `train` or `eval`; never kept while a graph is traced or captured, nor shared between CUDA
    streams. The one change torch keeps no count of is writing into `weight.data` or a NumPy view;
    call `eval()` after that.
    """

    def __init__(self) -> None:
        super().__init__()
        self._cache: CacheEntry | None = None

    def cached(self, key: Hashable, device: torch.device, make: Callable[[], Any]) -> Any:
        """`make()`, or what it gave last time for this key and these parameters."""
        if torch.compiler.is_compiling() or isinstance(device, Proxy):
            return make()
        weights = tuple(self.parameters())
        # None of these modules has a buffer of its own: one is the mask of torch.nn.utils.prune.
        if self.training or self._buffers or not _is_cacheable(weights, device):
            self._cache = None
            return make()
        key, stream = (key, device, torch.is_inference_mode_enabled()), _cuda_stream(device)
        kept = self._cache  # another thread may replace it meanwhile
        if kept is None or not kept.is_valid_for(key, weights, stream):
            value = make()
            parts = value if isinstance(value, tuple) else (value,)
            if any(type(part) is not Tensor for part in parts):  # a tracer's stand-in
                return value
            aliases, versions = tuple(w.detach() for w in weights), tuple(w._version for w in weights)
            kept = CacheEntry(key, weights, aliases, versions, stream, value)
            self._cache = kept
        return kept.value

    def train(self, mode: bool = True) -> Self:
        self._cache = None
        return super().train(mode)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        self._cache = None  # else memory stays taken on the device that the weights leave
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_cache": None}


def _is_cacheable(weights: tuple[Tensor, ...], device: torch.device) -> bool:
    """Only from plain parameters, computed with for real, when no gradient is to flow through them."""
    if weights and torch.is_grad_enabled():
        return False
    if any(type(w) is not nn.Parameter or w.is_inference() for w in weights):
        return False
    return not (device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def _cuda_stream(device: torch.device) -> int:
    """Another stream may not see the result finished."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0

"""From numbers drawn on the host to tensors on the device, and which images they are for.

Everything about an image's augmentation is drawn on the host, where its key is known, and sent in
one copy that nobody waits for. So the host also knows how many images each operation is for, and
an operation on some of them needs no answer from the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# b images, C channels, H W pixels

HostParams = dict[str, npt.NDArray[Any]]
"""Named arrays, a row for each image. Arrays of bool say which images an operation is for."""
DeviceParams = dict[str, Tensor]
"""The same on the device; see `apply_to_subset` for what became of the bools."""

ALIGNMENT = 64  # bytes: what compiled kernels like their inputs to start at


def apply_to_subset(which: Tensor, images: Tensor, change: Callable[..., Tensor], *parameters: Tensor) -> Tensor:
    """`change(images, *parameters)` for some images, the others as they were; may write into `images`.

    `which` is either b bool: all are computed and these kept, in static shapes, for torch.compile;
    or their numbers, in order: only these are computed.
    """
    if which.dtype == torch.bool:
        return torch.where(per_image(which), change(images, *parameters), images)
    if len(which) == 0:
        return images
    if len(which) == len(images):
        return change(images, *parameters)
    return images.index_copy_(0, which, change(images[which], *(p[which] for p in parameters)))


def per_image(values: Tensor) -> Tensor:
    """b -> b 1 1 1: one for each image."""
    return values[:, None, None, None]


def to_device(drawn: Mapping[str, HostParams], device: torch.device, static_shapes: bool) -> dict[str, DeviceParams]:
    """To the device, in one copy; `static_shapes` keeps bools as they are, else they become numbers of images."""
    flat = {(part, name): array for part, arrays in drawn.items() for name, array in arrays.items()}
    if not static_shapes:
        flat = {key: np.flatnonzero(a) if a.dtype == np.bool_ else a for key, a in flat.items()}
    tensors = _copy_to_device(list(flat.values()), device)
    out: dict[str, DeviceParams] = {part: {} for part in drawn}
    for (part, name), tensor in zip(flat, tensors, strict=True):
        out[part][name] = tensor
    return out


def _copy_to_device(arrays: list[npt.NDArray[Any]], device: torch.device) -> list[Tensor]:
    tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    if device.type != "cuda":
        return [tensor.to(device) for tensor in tensors]
    return _unpack(_pack(tensors, pinned=True).to(device, non_blocking=True), tensors)


def _pack(tensors: list[Tensor], *, pinned: bool) -> Tensor:
    """All of them in one piece of memory, as bytes."""
    spans = _spans(tensors)
    host = torch.empty(spans[-1].stop if spans else 0, dtype=torch.uint8, pin_memory=pinned)
    for span, tensor in zip(spans, tensors, strict=True):
        host[span].view(tensor.dtype).copy_(tensor.reshape(-1))  # a single number's stride may be 0
    return host


def _unpack(parcel: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """The same shapes and types as these, out of such a piece."""
    spans = _spans(tensors)
    return [parcel[span].view(t.dtype).view(t.shape) for span, t in zip(spans, tensors, strict=True)]


def _spans(tensors: list[Tensor]) -> list[slice]:
    start, spans = 0, []
    for tensor in tensors:
        spans.append(slice(start, start + tensor.nbytes))
        start += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return spans

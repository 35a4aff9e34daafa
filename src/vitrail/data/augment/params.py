"""Random parameters of the augmentation: drawn on the host, copied to the device, applied to some of the images.

All parameters of a batch are drawn on the host and copied in one asynchronous transfer. The host therefore
knows which images each operation applies to and need not wait for the device.
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
"""Named arrays with one row per image. Boolean arrays select the images an operation applies to."""
DeviceParams = dict[str, Tensor]
"""The same on the device, where boolean arrays may have become indices (see `apply_to_subset`)."""

ALIGNMENT = 64  # bytes, for the inputs of compiled kernels


def apply_to_subset(which: Tensor, images: Tensor, operation: Callable[..., Tensor], *parameters: Tensor) -> Tensor:
    """`operation(images, *parameters)` for some images, the others unchanged; may write into `images`.

    `which` selects them: as b bool, all images are computed, in static shapes for torch.compile; as sorted
    indices, only these are computed.
    """
    if which.dtype == torch.bool:
        return torch.where(per_image(which), operation(images, *parameters), images)
    if len(which) == 0:
        return images
    if len(which) == len(images):
        return operation(images, *parameters)
    return images.index_copy_(0, which, operation(images[which], *(p[which] for p in parameters)))


def per_image(values: Tensor) -> Tensor:
    """b -> b 1 1 1, to broadcast one value per image."""
    return values[:, None, None, None]


def to_device(params: Mapping[str, HostParams], device: torch.device, static_shapes: bool) -> dict[str, DeviceParams]:
    """Copy all arrays at once; unless `static_shapes`, boolean arrays become indices of images."""
    flat = {(part, name): array for part, arrays in params.items() for name, array in arrays.items()}
    if not static_shapes:
        flat = {key: np.flatnonzero(a) if a.dtype == np.bool_ else a for key, a in flat.items()}
    tensors = _copy_to_device(list(flat.values()), device)
    out: dict[str, DeviceParams] = {part: {} for part in params}
    for (part, name), tensor in zip(flat, tensors, strict=True):
        out[part][name] = tensor
    return out


def _copy_to_device(arrays: list[npt.NDArray[Any]], device: torch.device) -> list[Tensor]:
    tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    if device.type != "cuda":
        return [tensor.to(device) for tensor in tensors]
    return _unpack(_pack(tensors, pinned=True).to(device, non_blocking=True), tensors)


def _pack(tensors: list[Tensor], *, pinned: bool) -> Tensor:
    """All tensors in one buffer of bytes."""
    spans = _spans(tensors)
    host = torch.empty(spans[-1].stop if spans else 0, dtype=torch.uint8, pin_memory=pinned)
    for span, tensor in zip(spans, tensors, strict=True):
        host[span].view(tensor.dtype).copy_(tensor.reshape(-1))  # the stride of a single element may be 0
    return host


def _unpack(parcel: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Views of a packed buffer with the shapes and dtypes of `tensors`."""
    spans = _spans(tensors)
    return [parcel[span].view(t.dtype).view(t.shape) for span, t in zip(spans, tensors, strict=True)]


def _spans(tensors: list[Tensor]) -> list[slice]:
    start, spans = 0, []
    for tensor in tensors:
        spans.append(slice(start, start + tensor.nbytes))
        start += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return spans

"""Copies finished batches, with their targets and weights, from shared memory to the device."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vitrail.data.batch import Batch
from vitrail.data.sampler import Indices
from vitrail.data.sources.base import Targets
from vitrail.data.worker_pool import FinishedBatch, Pool

# b images of a batch, C channels, H W pixels, K classes


class TargetTable:
    """All targets of a source, by image index. If a label is `required`, images without one are not usable."""

    def __init__(self, targets: Targets, multi_label: bool, required: bool) -> None:
        self.targets, self.multi_label, self.required = targets, multi_label, required

    def targets_for(self, indices: Indices) -> Tensor:
        """b int64, or b K float32 of zeros and ones (multi-label); 0 without a label or for index -1."""
        targets = self.targets[np.maximum(indices, 0)]
        return torch.from_numpy(targets.astype(np.float32) if self.multi_label else np.maximum(targets, 0))

    def usable(self, indices: Indices) -> npt.NDArray[np.bool_]:
        """b: whether the index is that of an image which counts in training or evaluation."""
        if self.multi_label or not self.required:
            return indices >= 0
        return (indices >= 0) & (self.targets[np.maximum(indices, 0)] >= 0)


@dataclass(frozen=True)
class StagedBatch:
    """A batch whose copy to the device has been started."""

    images: Tensor
    targets: Tensor
    weights: Tensor
    indices: Tensor
    copied: torch.cuda.Event | None = None
    """Recorded after the copy; None for a synchronous copy."""

    def to_batch(self, step: int, slots: Tensor) -> Batch:
        """The batch, for use on the current stream, which waits for the copy; the host does not."""
        if self.copied is not None:
            current = torch.cuda.current_stream(self.images.device)
            current.wait_event(self.copied)
            for tensor in (self.images, self.targets, self.weights):
                tensor.record_stream(current)
        return Batch(step, self.images, self.targets, self.weights, slots, self.indices)


class BatchTransfer:
    """Copies batches to a device. On the CPU nothing is copied: the tensors are views of the shared memory."""

    asynchronous = False
    """Whether `send` returns before the copy is done, so that it is worth calling ahead of time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def send(self, finished: FinishedBatch, targets: Tensor, usable: npt.NDArray[np.bool_]) -> StagedBatch:
        """Start to copy a batch; images that are not usable or could not be read get weight 0."""
        weights = usable.astype(np.float32)
        weights[[row for row, _ in finished.errors]] = 0
        images = torch.from_numpy(finished.images).to(self.device, non_blocking=self.asynchronous)
        return StagedBatch(
            images.permute(0, 3, 1, 2),  # b C H W
            targets.to(self.device, non_blocking=self.asynchronous),
            torch.from_numpy(weights).to(self.device, non_blocking=self.asynchronous),
            torch.from_numpy(finished.indices),
        )

    def close(self) -> None:
        """Wait for copies that have been started."""


class CudaBatchTransfer(BatchTransfer):
    """Copies from pinned memory on a CUDA stream of its own, in parallel with the computation."""

    asynchronous = True

    def __init__(self, device: torch.device, pool: Pool) -> None:
        super().__init__(device)
        self.stream = torch.cuda.Stream(device)
        self.in_flight: deque[tuple[torch.cuda.Event, FinishedBatch]] = deque()
        memory = np.frombuffer(pool.buffer.memory, np.uint8)
        self.pinned: int | None = memory.ctypes.data
        if int(torch.cuda.cudart().cudaHostRegister(self.pinned, memory.nbytes, 0)) != 0:
            self.pinned = None  # pinning is not allowed here: copies are slower

    def send(self, finished: FinishedBatch, targets: Tensor, usable: npt.NDArray[np.bool_]) -> StagedBatch:
        while self.in_flight and self.in_flight[0][0].query():
            self.in_flight.popleft()  # frees its slot in the shared buffer
        with torch.cuda.stream(self.stream):
            staged = super().send(finished, targets, usable)
            copied = torch.cuda.Event()
            copied.record(self.stream)
        self.in_flight.append((copied, finished))
        return StagedBatch(staged.images, staged.targets, staged.weights, staged.indices, copied)

    def close(self) -> None:
        self.stream.synchronize()
        self.in_flight.clear()
        if self.pinned is not None:
            torch.cuda.cudart().cudaHostUnregister(self.pinned)
            self.pinned = None


def make_transfer(device: torch.device, pool: Pool) -> BatchTransfer:
    return CudaBatchTransfer(device, pool) if device.type == "cuda" else BatchTransfer(device)

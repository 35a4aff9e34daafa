"""The last stretch: finished batches from shared memory to the device."""

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
    """All labels of a source, by the images' numbers; `required`: an image without one counts for nothing."""

    def __init__(self, targets: Targets, multi_label: bool, required: bool) -> None:
        self.targets, self.multi_label, self.required = targets, multi_label, required

    def targets_for(self, indices: Indices) -> Tensor:
        """b int64, or b K float32 of zeros and ones; 0 where there is no label or no image."""
        found = self.targets[np.maximum(indices, 0)]
        return torch.from_numpy(found.astype(np.float32) if self.multi_label else np.maximum(found, 0))

    def usable(self, indices: Indices) -> npt.NDArray[np.bool_]:
        """b: whether there is an image to learn from or to measure on."""
        if self.multi_label or not self.required:
            return indices >= 0
        return (indices >= 0) & (self.targets[np.maximum(indices, 0)] >= 0)


@dataclass(frozen=True)
class StagedBatch:
    """A batch on its way to the device, or there."""

    images: Tensor
    targets: Tensor
    weights: Tensor
    indices: Tensor
    copied: torch.cuda.Event | None = None

    def to_batch(self, step: int, slots: Tensor) -> Batch:
        """What is computed from now on waits for the copy; nobody else does."""
        if self.copied is not None:
            current = torch.cuda.current_stream(self.images.device)
            current.wait_event(self.copied)
            for tensor in (self.images, self.targets, self.weights):
                tensor.record_stream(current)
        return Batch(step, self.images, self.targets, self.weights, slots, self.indices)


class BatchTransfer:
    """How batches get to a device. To the CPU there is none: the shared memory itself is lent."""

    asynchronous = False
    """Whether a batch sets out before it is asked for, and nobody waits while it travels."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def send(self, taken: FinishedBatch, targets: Tensor, count: npt.NDArray[np.bool_]) -> StagedBatch:
        """A batch with its labels; what does not count, or could not be read, has weight 0."""
        weights = count.astype(np.float32)
        weights[[row for row, _ in taken.errors]] = 0
        return StagedBatch(
            torch.from_numpy(taken.images)
            .to(self.device, non_blocking=self.asynchronous)
            .permute(0, 3, 1, 2),  # b C H W
            targets.to(self.device, non_blocking=self.asynchronous),
            torch.from_numpy(weights).to(self.device, non_blocking=self.asynchronous),
            torch.from_numpy(taken.indices),
        )

    def close(self) -> None:
        """What is under way arrives."""


class CudaBatchTransfer(BatchTransfer):
    """From pinned memory, beside what is being computed."""

    asynchronous = True

    def __init__(self, device: torch.device, pool: Pool) -> None:
        super().__init__(device)
        self.stream = torch.cuda.Stream(device)
        self.in_flight: deque[tuple[torch.cuda.Event, FinishedBatch]] = deque()
        memory = np.frombuffer(pool.buffer.memory, np.uint8)
        self.pinned: int | None = memory.ctypes.data
        if int(torch.cuda.cudart().cudaHostRegister(self.pinned, memory.nbytes, 0)) != 0:
            self.pinned = None  # not allowed here: slower, and as right

    def send(self, taken: FinishedBatch, targets: Tensor, count: npt.NDArray[np.bool_]) -> StagedBatch:
        while self.in_flight and self.in_flight[0][0].query():
            self.in_flight.popleft()  # its memory may be used again
        with torch.cuda.stream(self.stream):
            sent = super().send(taken, targets, count)
            copied = torch.cuda.Event()
            copied.record(self.stream)
        self.in_flight.append((copied, taken))
        return StagedBatch(sent.images, sent.targets, sent.weights, sent.indices, copied)

    def close(self) -> None:
        self.stream.synchronize()
        self.in_flight.clear()
        if self.pinned is not None:
            torch.cuda.cudart().cudaHostUnregister(self.pinned)
            self.pinned = None


def make_transfer(device: torch.device, pool: Pool) -> BatchTransfer:
    return CudaBatchTransfer(device, pool) if device.type == "cuda" else BatchTransfer(device)
